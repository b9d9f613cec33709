// What CUDA C supplies and g++ lacks, so that kernels.cu runs on a CPU, one thread after the other.
//
// Each thread of a block runs up to its next barrier, in the order of the threads or backwards:
// where a barrier is missing, one of both orders reads what is not yet written. Shared memory is
// NaN at first, and what lies behind the part that was asked for has to stay so.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <tuple>
#include <vector>

#define __global__
#define __device__
#define __shared__
using __half = _Float16;
using std::exp, std::fmax, std::max, std::min, std::sqrt;

struct Index {
    unsigned x, y, z;
} threadIdx, blockIdx, blockDim, gridDim;

alignas(16) char memory[48 << 10] asm("shared");  // the array `shared` of kernels.cu lies here

std::vector<ucontext_t> threads;
ucontext_t between;  // where a thread leaves off, and the next one goes on
std::vector<char> running, stacks;
std::function<void()> one_thread;

inline void __syncthreads() { swapcontext(&threads[threadIdx.x], &between); }

inline void run_thread()
{
    one_thread();
    running[threadIdx.x] = 0;
    __syncthreads();
}

inline bool run_block(bool backwards)  // false where a barrier was not reached by all threads
{
    const unsigned count = blockDim.x, size = 1 << 16;
    stacks.resize(size_t(count) * size);
    threads.resize(count);
    running.assign(count, 1);
    for (unsigned t = 0; t < count; t++) {
        getcontext(&threads[t]);
        threads[t].uc_stack.ss_sp = &stacks[size_t(t) * size];
        threads[t].uc_stack.ss_size = size;
        makecontext(&threads[t], run_thread, 0);
    }
    for (unsigned still = count; still == count;) {
        for (unsigned t = 0; t < count; t++) {
            threadIdx.x = backwards ? count - 1 - t : t;
            swapcontext(&between, &threads[threadIdx.x]);
        }
        still = std::count(running.begin(), running.end(), 1);
        if (still == 0) return true;
    }
    return false;
}

// Launch a kernel as the driver does, with pointers to its arguments, whose bytes are `sizes`.
// Returns what is wrong with it, or nothing.
template <typename... P>
const char *launch(void (*kernel)(P...), void **arguments, std::vector<size_t> sizes,
                   const unsigned *grid, unsigned block, size_t shared_bytes, bool backwards)
{
    char *const end = memory + sizeof memory;
    if (sizes != std::vector<size_t>{sizeof(P)...}) return "arguments are of other sizes";
    if (shared_bytes > sizeof memory) return "more shared memory than a block has";
    const std::tuple<P...> values{*static_cast<P *>(*arguments++)...};
    one_thread = [&] { std::apply(kernel, values); };
    blockDim = {block, 1, 1};
    gridDim = {grid[0], grid[1], grid[2]};
    for (blockIdx.z = 0; blockIdx.z < grid[2]; blockIdx.z++)
        for (blockIdx.y = 0; blockIdx.y < grid[1]; blockIdx.y++)
            for (blockIdx.x = 0; blockIdx.x < grid[0]; blockIdx.x++) {
                std::fill(memory, end, '\xff');
                if (!run_block(backwards)) return "a barrier is not reached by all threads";
                if (std::count(memory + shared_bytes, end, '\xff') != end - memory - shared_bytes)
                    return "shared memory is written to behind what was asked for";
            }
    return nullptr;
}

#define LAUNCHABLE(kernel)                                                                        \
    extern "C" const char *launch_##kernel(void **arguments, const size_t *sizes, int count,      \
        const unsigned *grid, unsigned block, size_t shared_bytes, bool backwards)                \
    {                                                                                             \
        return launch(kernel, arguments, {sizes, sizes + count}, grid, block, shared_bytes,       \
                      backwards);                                                                 \
    }
