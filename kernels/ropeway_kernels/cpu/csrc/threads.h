// The one pool of threads that computes, and buffers that only grow.
//
// Owns: how work is shared out. Must not know: what the work is. Called by: the kernels.
// The pool's threads sleep between steps; they wait actively only for the moment between two kernels. torch's own pool
// sleeps meanwhile: what is left to torch in a step is too small to be shared out.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace ropeway {

// The part of a range that one thread starts with. Padded, so that two threads' counters share no cache line.
struct alignas(64) Share {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
};

int num_threads();
void set_num_threads(int count);
Share* thread_shares();  // one per thread
void run_on_pool(int64_t items, void (*body)(const void* context, int64_t item), const void* context);

namespace {

// Runs body(item) for every item; items go to whichever thread is free, in order, so a disturbed thread gets less.
// Returns when all are done. Not to be called from within an item.
template <class Body>
void parallel_for(int64_t items, const Body& body) {
    if (items <= 1 || num_threads() == 1) {
        for (int64_t item = 0; item < items; ++item) body(item);
        return;
    }
    run_on_pool(items, [](const void* context, int64_t item) { (*static_cast<const Body*>(context))(item); }, &body);
}

// Runs body(begin, end) over pieces of [0, count), `grain` long or shorter. A thread walks its own contiguous share in
// order, so what it touches next lies right behind; when done, it helps with the shares of others.
template <class Body>
void parallel_shares(int64_t count, int64_t grain, const Body& body) {
    const int threads = num_threads();
    Share* const shares = thread_shares();
    for (int64_t t = 0; t < threads; ++t) {
        shares[t].next.store(count * t / threads, std::memory_order_relaxed);
        shares[t].end = count * (t + 1) / threads;
    }
    parallel_for(threads, [&](int64_t first) {
        for (int64_t t = 0; t < threads; ++t) {
            Share& share = shares[(first + t) % threads];
            for (int64_t begin; (begin = share.next.fetch_add(grain, std::memory_order_relaxed)) < share.end;)
                body(begin, begin + grain < share.end ? begin + grain : share.end);
        }
    });
}

// A buffer that only grows. One per purpose and thread, so that steady state allocates nothing.
class Scratch {
public:
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch() { std::free(data_); }

    template <class T>
    T* get(size_t count) {
        const size_t bytes = count * sizeof(T);
        if (bytes > size_) {
            std::free(data_);
            constexpr size_t kHugePage = size_t{2} << 20;
            const size_t alignment = bytes >= kHugePage ? kHugePage : 64;
            size_ = (bytes + alignment - 1) / alignment * alignment;
            data_ = std::aligned_alloc(alignment, size_);
            if (data_ == nullptr) throw std::bad_alloc();
#ifdef __linux__
            if (alignment == kHugePage) madvise(data_, size_, MADV_HUGEPAGE);
#endif
        }
        return static_cast<T*>(data_);
    }

private:
    void* data_ = nullptr;
    size_t size_ = 0;
};

}  // namespace
}  // namespace ropeway
