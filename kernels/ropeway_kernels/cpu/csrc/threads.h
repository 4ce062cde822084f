// The one pool of threads: OpenMP's, which torch uses too (the library is linked against the same soname).
//
// Owns: how work is shared out. Must not know: what the work is. Called by: the kernels.
// The pool's threads sleep between steps; OpenMP lets them wait actively only for the moment between two kernels.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __linux__
#include <sys/mman.h>
#endif

namespace ropeway {

int num_threads();

namespace {

// Runs body(item) for every item; items go to whichever thread is free, in order, so a disturbed thread gets less.
template <class Body>
void parallel_for(int64_t items, const Body& body) {
    const int threads = static_cast<int>(items < num_threads() ? items : num_threads());
    if (threads <= 1) {
        for (int64_t item = 0; item < items; ++item) body(item);
        return;
    }
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
#endif
    for (int64_t item = 0; item < items; ++item) body(item);
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
