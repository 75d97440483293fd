// CUDA's words for a C++ compiler: a block's threads are threads of the host, which meet at barriers, and the lanes of a
// warp exchange values through a buffer. Blocks run one after the other, so what is __shared__ may be static.
#pragma once
#include <array>
#include <barrier>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <tuple>

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
struct Warp {
  std::barrier<> meeting{LANES};
  std::array<uint32_t, LANES> words{};
};

// The threads of a block, made once: a launch wakes them, and they run its blocks one after the other.
class Block {
 public:
  std::barrier<> meeting{THREADS};
  std::array<Warp, THREADS / LANES> warps;

  Block() {
    for (unsigned t = 0; t < THREADS; ++t) std::thread(&Block::live, this, t).detach();
  }
  void run(unsigned blocks, const std::function<void()>& kernel) {
    blocks_ = blocks;
    kernel_ = &kernel;
    begin_.arrive_and_wait();
    end_.arrive_and_wait();
  }

 private:
  void live(unsigned thread) {
    threadIdx.x = thread;
    for (;;) {
      begin_.arrive_and_wait();
      for (unsigned b = 0; b < blocks_; ++b) {
        blockIdx.x = b;
        (*kernel_)();
        through_.arrive_and_wait();  // a thread that has returned early waits here for its block
      }
      end_.arrive_and_wait();
    }
  }
  std::barrier<> begin_{THREADS + 1}, end_{THREADS + 1}, through_{THREADS};
  unsigned blocks_ = 0;
  const std::function<void()>* kernel_ = nullptr;
};
inline Block& block() {
  static Block* const one = new Block;  // it outlives everything: its threads end with the process
  return *one;
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
  warp.meeting.arrive_and_wait();
  memcpy(&value, &warp.words[from], 4);
  warp.meeting.arrive_and_wait();
  return value;
}

inline void current_stream(int, void** stream) { *stream = nullptr; }

}  // namespace host

inline void __syncthreads() { host::block().meeting.arrive_and_wait(); }
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
