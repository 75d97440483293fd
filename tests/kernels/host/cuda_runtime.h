// CUDA's words for a C++ compiler: a block's threads are fibers of one thread of the host, which give way to one another
// at barriers, and the lanes of a warp exchange values through a buffer. Blocks run one after the other, so what is
// __shared__ may be static. A barrier that some of its threads never reach ends the process with a message.
#pragma once
#include <ucontext.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <tuple>
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __shared__ static

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess };
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "none"; }
inline void cudaGetDevice(int* device) { *device = 0; }
inline void cudaSetDevice(int) {}

struct Place {
  unsigned x = 0;
};
inline thread_local Place threadIdx, blockIdx;

namespace host {

constexpr unsigned LANES = 32, THREADS = 256;
constexpr size_t STACK = 256 * 1024;

// Where so many threads wait for one another.
struct Meeting {
  unsigned wanted, here = 0, round = 0;
};
struct Warp {
  Meeting meeting{LANES};
  std::array<uint32_t, LANES> words{};
};

// The threads of a block. One of them runs at a time, until it has to wait or has ended.
class Block {
 public:
  Meeting meeting{THREADS};
  std::array<Warp, THREADS / LANES> warps;

  void run(unsigned blocks, const std::function<void()>& kernel) {
    kernel_ = &kernel;
    for (unsigned b = 0; b < blocks; ++b) {
      blockIdx.x = b;
      begin();
      enter(0, home_);
      if (meeting.here) lost();
    }
  }

  void wait(Meeting& at) {
    const unsigned round = at.round;
    if (++at.here == at.wanted) {
      at.here = 0;
      ++at.round;
      idle_ = 0;
      return;
    }
    while (at.round == round) {
      if (++idle_ > 2 * THREADS) lost();
      pass(fibers_[threadIdx.x]);
    }
  }

 private:
  struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    bool ended = false;
    void* shadow = nullptr;  // of the address sanitizer
  };

  static void lost() {
    fputs("a barrier that not all of its threads reach\n", stderr);
    std::abort();
  }

  void begin() {
    left_ = THREADS;
    idle_ = 0;
    for (Fiber& fiber : fibers_) {
      if (!fiber.stack) fiber.stack.reset(new char[STACK]);
      fiber.ended = false;
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.get();
      fiber.context.uc_stack.ss_size = STACK;
      fiber.context.uc_link = nullptr;
      makecontext(&fiber.context, &Block::live, 0);
    }
  }

  // What a fiber does; it never returns.
  static void live();

  // From `from` to the next thread that has not ended.
  void pass(Fiber& from) {
    unsigned next = threadIdx.x;
    do {
      next = (next + 1) % THREADS;
    } while (fibers_[next].ended);
    enter(next, from);
  }

  void enter(unsigned thread, Fiber& from) {
    const unsigned own = threadIdx.x;
    threadIdx.x = thread;
    change(from, fibers_[thread]);
    threadIdx.x = own;
  }

  void change(Fiber& from, Fiber& to) {
    if (&from == &to) return;
#ifdef __SANITIZE_ADDRESS__
    const bool home = &to == &home_;
    __sanitizer_start_switch_fiber(from.ended ? nullptr : &from.shadow, home ? bottom_ : to.stack.get(),
                                   home ? size_ : STACK);
#endif
    swapcontext(&from.context, &to.context);
    arrived(from);
  }

  // What the sanitizer is told behind a change of stacks.
  void arrived(Fiber& fiber) {
#ifdef __SANITIZE_ADDRESS__
    const void* bottom;
    size_t size;
    __sanitizer_finish_switch_fiber(fiber.shadow, &bottom, &size);
    if (!bottom_) {
      bottom_ = bottom;
      size_ = size;
    }
#else
    (void)fiber;
#endif
  }

  std::array<Fiber, THREADS> fibers_;
  Fiber home_;  // who launched
  unsigned left_ = 0, idle_ = 0;  // threads that have not ended; turns in which nobody got on
  const void* bottom_ = nullptr;  // of the launcher's stack
  size_t size_ = 0;
  const std::function<void()>* kernel_ = nullptr;
};
inline Block& block() {
  static thread_local Block* const one = new Block;  // it outlives everything
  return *one;
}
inline void Block::live() {
  Block& own = block();
  Fiber& fiber = own.fibers_[threadIdx.x];
  own.arrived(fiber);
  (*own.kernel_)();
  fiber.ended = true;
  own.idle_ = 0;
  if (--own.left_)
    own.pass(fiber);
  else
    own.change(fiber, own.home_);
  std::abort();
}

// kernel<<<blocks, threads, 0, stream>>>(arguments...)
template <class... Parameters, class... Arguments>
void launch(unsigned blocks, int threads, void (*kernel)(Parameters...), Arguments&&... given) {
  if (threads != THREADS) std::abort();
  const std::tuple<Parameters...> arguments(std::forward<Arguments>(given)...);
  block().run(blocks, [&] { std::apply(kernel, arguments); });
}

template <class T>
T exchanged(T value, unsigned from) {
  static_assert(sizeof(T) == 4);
  Warp& warp = block().warps[threadIdx.x / LANES];
  memcpy(&warp.words[threadIdx.x % LANES], &value, 4);
  block().wait(warp.meeting);
  memcpy(&value, &warp.words[from], 4);
  block().wait(warp.meeting);
  return value;
}

inline void current_stream(int, void** stream) { *stream = nullptr; }

}  // namespace host

inline void __syncthreads() { host::block().wait(host::block().meeting); }
template <class T>
T __shfl_down_sync(unsigned, T value, int offset) {
  const unsigned lane = threadIdx.x % host::LANES, from = lane + static_cast<unsigned>(offset);
  return host::exchanged(value, from < host::LANES ? from : lane);
}
template <class T>
T __shfl_up_sync(unsigned, T value, int offset) {
  const unsigned lane = threadIdx.x % host::LANES, by = static_cast<unsigned>(offset);
  return host::exchanged(value, lane >= by ? lane - by : lane);
}
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return host::exchanged(value, static_cast<unsigned>(lane));
}

inline _Float16 __float2half_rn(float x) { return static_cast<_Float16>(x); }
inline uint16_t __half_as_ushort(_Float16 x) {
  uint16_t bits;
  memcpy(&bits, &x, 2);
  return bits;
}
inline uint16_t __float2bfloat16_rn(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (x != x) return static_cast<uint16_t>((bits | 0x400000) >> 16);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline uint16_t __bfloat16_as_ushort(uint16_t x) { return x; }
