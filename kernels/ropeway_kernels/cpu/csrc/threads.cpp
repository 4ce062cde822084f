// The pool behind parallel_for.
//
// Owns: the worker threads and how a caller and they meet. Called by: threads.h, from one thread at a time.
//
// The caller takes items like any worker and at the end waits only for those that hold one. So a worker that the system
// has not scheduled yet costs its help and nothing else. With a barrier that every worker must reach, as OpenMP has, each
// of a step's hundred kernels would wait for the scheduler's next tick as soon as another process wants a core.

#include "threads.h"

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ropeway {
namespace {

// A worker waits for the next job with its core, then (some microseconds later) lets others have it whenever they want it,
// and sleeps only when there has been nothing for longer than the pause between two steps: the system wakes a thread where
// it sees fit, often on the caller's own core, where it would sit behind the caller for milliseconds.
constexpr int kSpins = 500;
constexpr std::chrono::milliseconds kPatience{4};

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Pool {
public:
    int size() const { return helpers_ + 1; }
    Share* shares() { return shares_.get(); }

    void resize(int count) {
        helpers_ = count > 1 ? count - 1 : 0;
        shares_.reset(new Share[size()]);
        while (started_ < helpers_) std::thread(&Pool::work, this, started_++).detach();
    }

    void run(int64_t items, void (*body)(const void*, int64_t), const void* context) {
        body_ = body;
        context_ = context;
        items_ = items;
        next_.store(0, std::memory_order_relaxed);
        invited_.store(static_cast<int>(items - 1 < helpers_ ? items - 1 : helpers_), std::memory_order_relaxed);
        open_.store(true);
        jobs_.fetch_add(1);
        if (asleep_.load() > 0) {
            { std::lock_guard<std::mutex> lock(mutex_); }  // nobody is between its last look and its sleep
            wake_.notify_all();
        }
        take();
        open_.store(false);
        for (int spins = 0; inside_.load() != 0; ++spins) wait(spins);
    }

private:
    void take() {
        for (int64_t item; (item = next_.fetch_add(1, std::memory_order_relaxed)) < items_;) body_(context_, item);
    }

    void work(int index) {
        uint64_t seen = 0;
        for (;;) {
            const auto began = std::chrono::steady_clock::now();
            for (int spins = 0; jobs_.load() == seen; ++spins) {
                wait(spins);
                if (spins >= kSpins && std::chrono::steady_clock::now() - began > kPatience) break;
            }
            if (jobs_.load() == seen) {
                std::unique_lock<std::mutex> lock(mutex_);
                asleep_.fetch_add(1);
                wake_.wait(lock, [&] { return jobs_.load() != seen; });
                asleep_.fetch_sub(1);
            }
            seen = jobs_.load();
            // The fields of a job are read only from inside, and written only while nobody is inside.
            inside_.fetch_add(1);
            if (open_.load() && index < invited_.load(std::memory_order_relaxed)) take();
            inside_.fetch_sub(1);
        }
    }

    static void wait(int spins) {
        if (spins < kSpins)
            relax();
        else
            std::this_thread::yield();  // the one that is waited for may need this very core
    }

    int helpers_ = 0;
    int started_ = 0;
    std::unique_ptr<Share[]> shares_{new Share[1]};
    void (*body_)(const void*, int64_t) = nullptr;
    const void* context_ = nullptr;
    int64_t items_ = 0;
    std::atomic<int> invited_{0};
    std::atomic<uint64_t> jobs_{0};
    std::atomic<bool> open_{false};
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) std::atomic<int> inside_{0};
    std::atomic<int> asleep_{0};
    std::mutex mutex_;
    std::condition_variable wake_;
};

// Never destroyed: its threads sleep on it until the process is gone.
Pool& pool() {
    static Pool* const only = new Pool;
    return *only;
}

}  // namespace

int num_threads() { return pool().size(); }

void set_num_threads(int count) { pool().resize(count); }

Share* thread_shares() { return pool().shares(); }

void run_on_pool(int64_t items, void (*body)(const void*, int64_t), const void* context) {
    pool().run(items, body, context);
}

}  // namespace ropeway
