// Group-quantised matrix products on a CPU, attention over the KV cache, and a Plan that runs a
// whole decode step, recorded once, as one call.
//
// Weights are numbers of 4, 5, 6 or 8 bits in groups of 32 inputs, as model files have them:
// w = u * scale + minimum, u unsigned, or without minima w = (u - 2^(bits - 1)) * scale. With 6 bits
// every 16 inputs have a scale of their own. Activations are rounded to 14 bits per group, as two
// signed bytes of 7 (high * 128 + low), so that products run in integer dot-product instructions
// and still lose next to nothing. Of 7 bits, the sums of two products with any weight fit into the
// 16 bits that AVX2 adds them in.
//
// Packed weights (see `pack`): tiles of 16 rows; a tile holds its groups one after another, each
// as numbers, float16 scales, and float16 minima if it has some. Numbers come in blocks, four
// inputs of 16 rows, 64 bytes: with 8 bits as they are, else a byte's low half has the lower four
// bits of one block and its high half those of the next. The bits above four follow: byte i of the
// rest has those of byte i of all blocks, or of the four blocks that fit.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

namespace {

using at::Tensor;

constexpr int64_t kGroup = 32;         // inputs that share a scale
constexpr int64_t kTile = 16;          // rows that are multiplied side by side
constexpr int64_t kBlock = 4;          // inputs that one instruction multiplies and adds
constexpr int64_t kBlocks = kGroup / kBlock;
constexpr int64_t kTilesPerChunk = 2;  // what a thread takes at a time
constexpr int64_t kRowsPerChunk = 32;  // of dense weights, or of activations
constexpr int64_t kSpan = 128;         // cached positions that one piece of attention covers

int64_t up(int64_t n, int64_t unit) { return (n + unit - 1) / unit; }

// ---- Vectors: the compiler's own, so that one source serves every processor -------------------

#if defined(__AVX512VNNI__)
constexpr int kWidth = 64;  // bytes of a register
#elif defined(__AVX2__)
constexpr int kWidth = 32;
#else
constexpr int kWidth = 16;
#endif
constexpr int kLanes = kWidth / sizeof(float);

typedef float Floats __attribute__((vector_size(kWidth), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(kWidth), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(kWidth), aligned(4), may_alias));
typedef uint16_t Pairs __attribute__((vector_size(kWidth), aligned(2), may_alias));
typedef uint8_t Bytes __attribute__((vector_size(kWidth), aligned(1), may_alias));
typedef uint16_t Shorts __attribute__((vector_size(kWidth / 2), aligned(2), may_alias));
typedef int32_t Word __attribute__((aligned(1), may_alias));
typedef int8_t Quarters __attribute__((vector_size(kWidth / 4), aligned(1), may_alias));

inline Floats load(const float* p) { return *reinterpret_cast<const Floats*>(p); }

inline Floats load(const at::BFloat16* p) {
  return (Floats)(__builtin_convertvector(*reinterpret_cast<const Shorts*>(p), Words) << 16);
}

inline Floats load(const at::Half* p) {
#if defined(__AVX512VNNI__)
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  Floats wide;
  for (int i = 0; i < kLanes; ++i) wide[i] = static_cast<float>(p[i]);
  return wide;
#endif
}

// 2 * kLanes numbers in the order that is quickest to read: of bfloat16 those with even numbers,
// then the others, for the upper half of a word is a float as it is.
template <typename T>
constexpr bool kInPairs = std::is_same_v<T, at::BFloat16>;

template <typename T>
inline void load_two(const T* p, Floats& a, Floats& b) {
  if constexpr (kInPairs<T>) {
    const Words two = *reinterpret_cast<const Words*>(p);
    a = (Floats)(two << 16);
    b = (Floats)(two & 0xffff0000);
  } else {
    a = load(p);
    b = load(p + kLanes);
  }
}

// Where number i of a row of n is after all of the row was read by `load_two`.
template <typename T>
inline int64_t place_of(int64_t i, int64_t n) {
  constexpr int64_t kTwo = 2 * kLanes;
  if (!kInPairs<T> || i >= n / kTwo * kTwo) return i;
  return i / kTwo * kTwo + i % 2 * kLanes + i % kTwo / 2;
}

inline void store(Floats v, float* p) { *reinterpret_cast<Floats*>(p) = v; }

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

template <typename V, typename Combine>
inline auto reduce(V v, Combine combine) {
  auto part = v[0];
  decltype(part) parts[kLanes];
  std::memcpy(parts, &v, sizeof v);
  for (int width = kLanes / 2; width; width /= 2) {
    for (int i = 0; i < width; ++i) parts[i] = combine(parts[i], parts[i + width]);
  }
  return parts[0];
}

template <typename V>
inline auto sum(V v) {
  return reduce(v, [](auto a, auto b) { return a + b; });
}

// Lane i of the result is the sum of all lanes of each[i].
template <int... kIndex>
inline Floats sums_of(const Floats* each, std::integer_sequence<int, kIndex...>) {
  Floats sums[kLanes];
  std::copy_n(each, kLanes, sums);
#pragma GCC unroll 4
  for (int width = kLanes / 2; width; width /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < width; ++i) {
      const Floats a = sums[i], b = sums[i + width];
#if defined(__clang__)
      sums[i] = __builtin_shufflevector(a, b, (kIndex / 2 + kIndex % 2 * kLanes)...) +
                __builtin_shufflevector(a, b, (kIndex / 2 + kIndex % 2 * kLanes + kLanes / 2)...);
#else
      sums[i] = __builtin_shuffle(a, b, Ints{(kIndex / 2 + kIndex % 2 * kLanes)...}) +
                __builtin_shuffle(a, b, Ints{(kIndex / 2 + kIndex % 2 * kLanes + kLanes / 2)...});
#endif
    }
  }
  return sums[0];
}

// e^x for x <= 0, to about 2e-7: 2^n times a polynomial in the rest, after Cephes' expf.
inline Floats exp_negative(Floats x) {
  const Floats floor = Floats{} - 87.0f;
  x = x < floor ? floor : x;
  const Ints n = __builtin_convertvector(x * 1.44269504f - 0.5f, Ints);
  const Floats whole = __builtin_convertvector(n, Floats);
  const Floats r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Ints power = (n + 127) << 23;
  return p * reinterpret_cast<const Floats&>(power);
}

template <typename T>
inline float dot(const float* x, const T* w, int64_t n) {
  Floats a{}, b{};
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    a += load(x + i) * load(w + i);
    b += load(x + i + kLanes) * load(w + i + kLanes);
  }
  for (; i + kLanes <= n; i += kLanes) a += load(x + i) * load(w + i);
  float total = sum(a + b);
  for (; i < n; ++i) total += x[i] * static_cast<float>(w[i]);
  return total;
}

// RMS norm of n floats; `to` may be `x` itself.
inline void normalise(const float* x, const float* weight, double eps, int64_t n, float* to) {
  const float inverse = 1.0f / std::sqrt(dot(x, x, n) / n + static_cast<float>(eps));
  for (int64_t i = 0; i < n; ++i) to[i] = x[i] * inverse * weight[i];
}

// ---- Threads ---------------------------------------------------------------------------------

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

struct Step {
  std::function<int64_t()> count;  // chunks, asked once per run, when the step begins
  std::function<void(int64_t)> run;
};

// Steps that run one after another, the chunks of each on whatever threads are free. Nobody waits
// for a thread, only for chunks that were begun: a helper that the system has put aside between
// two chunks costs nothing.
class Job {
 public:
  explicit Job(std::vector<Step> steps) : steps_(std::move(steps)), counts_(steps_.size()) {}

  void open() { publish(0, kNoChunk, ++generation_ & 0xffffff); }

  void lead() {
    const uint64_t generation = generation_ & 0xffffff;
    for (size_t i = 0; i < steps_.size(); ++i) {
      const int64_t count = steps_[i].count();
      if (count == 1) {
        steps_[i].run(0);
        continue;
      }
      counts_[i].store(count, std::memory_order_relaxed);
      done_.store(0, std::memory_order_relaxed);
      publish(i, 0, generation);
      while (take_chunk()) {
      }
      for (int spins = 0; done_.load(std::memory_order_acquire) < count; ++spins) {
        relax();
        if (spins > 10000) std::this_thread::yield();
      }
    }
    publish(steps_.size(), kNoChunk, generation);
  }

  void help() {
    const uint64_t first = state_.load(std::memory_order_acquire);
    for (;;) {
      const uint64_t now = state_.load(std::memory_order_acquire);
      if (now >> 40 != first >> 40 || step_of(now) >= steps_.size()) return;
      if (!take_chunk()) relax();
    }
  }

 private:
  static constexpr uint64_t kNoChunk = 0xfffff;
  static uint64_t step_of(uint64_t state) { return state >> 20 & 0xfffff; }
  static int64_t chunk_of(uint64_t state) { return static_cast<int64_t>(state & 0xfffff); }

  // Run, step and next chunk are one word, so a thread that was put aside before it took a chunk
  // can never take one of another step or run.
  void publish(uint64_t step, uint64_t chunk, uint64_t generation) {
    state_.store(generation << 40 | step << 20 | chunk, std::memory_order_release);
  }

  bool take_chunk() {
    uint64_t state = state_.load(std::memory_order_acquire);
    for (;;) {
      const uint64_t step = step_of(state);
      if (step >= steps_.size()) return false;
      if (chunk_of(state) >= counts_[step].load(std::memory_order_relaxed)) return false;
      if (state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) {
        steps_[step].run(chunk_of(state));
        done_.fetch_add(1, std::memory_order_release);
        return true;
      }
    }
  }

  const std::vector<Step> steps_;
  std::vector<std::atomic<int64_t>> counts_;
  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<int64_t> done_{0};
  uint64_t generation_ = 0;
};

// Helper threads, which sleep between jobs: a spinning thread would take a core from the screen.
class Pool {
 public:
  static Pool& get() {
    static Pool* pool = new Pool;  // never destroyed: its threads end with the process
    return *pool;
  }

  void run(const std::shared_ptr<Job>& job, int64_t threads) {
    std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    job->open();
    if (threads > 1 && turn.owns_lock()) {
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (; helpers_ < threads - 1; ++helpers_) std::thread([this, i = helpers_] { serve(i); }).detach();
        job_ = job;
        wanted_ = threads - 1;
        ++epoch_;
      }
      wake_.notify_all();
    }
    job->lead();
  }

 private:
  void serve(int64_t index) {
    uint64_t seen = 0;
    for (;;) {
      std::shared_ptr<Job> job;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return epoch_ != seen; });
        seen = epoch_;
        if (index < wanted_) job = job_;
      }
      if (job) job->help();
    }
  }

  std::mutex turn_, mutex_;
  std::condition_variable wake_;
  std::shared_ptr<Job> job_;
  int64_t helpers_ = 0, wanted_ = 0;
  uint64_t epoch_ = 0;
};

// ---- Quantised products ----------------------------------------------------------------------

// How a weight is held; see the top of this file.
struct Form {
  int64_t bits;
  bool minima;

  constexpr int64_t scales() const { return bits == 6 ? 2 : 1; }  // of a row's group
  constexpr int64_t number_bytes() const { return kTile * kGroup * bits / 8; }
  constexpr int64_t group_bytes() const { return number_bytes() + 2 * kTile * (scales() + minima); }
  constexpr int64_t offset() const { return minima ? 0 : 1 << (bits - 1); }

  static void check(int64_t bits, bool minima) {
    TORCH_CHECK(bits == 4 || bits == 5 || bits == 6 || bits == 8, "weights have 4, 5, 6 or 8 bits");
    TORCH_CHECK(!minima || bits <= 5, "weights of ", bits, " bits have no minima");
  }
};

constexpr int kLow = 7;  // bits of an activation's lower byte
constexpr float kMost = 63 * 128 + 63;

#if defined(__AVX512VNNI__)
constexpr int64_t kTogether = 8;  // rows of activations that are multiplied at a time
#else
constexpr int64_t kTogether = 4;
#endif

// Rows of activations, rounded. They are held in runs of `kTogether` rows and, where fewer are
// left, of half as many, and so on.
class Activations {
 public:
  Activations(int64_t rows, int64_t inputs)
      : rows_(rows),
        groups_(inputs / kGroup),
        numbers_(rows * inputs * 2),
        scale_(rows * groups_),
        sum_(rows * groups_),
        half_sum_(rows * groups_ * 2) {}

  // Rows begin ... begin + size - 1. What they have for a block, or a group, lies side by side.
  struct Run {
    int64_t begin, size;
    int8_t* numbers;  // (groups, blocks, size, 2, kBlock): high bytes, low bytes
    float* scale;     // (groups, size)
    float* sum;       // (groups, size): of what the numbers stand for
    float* half_sum;  // (groups, 2, size): of the first 16 of a group, of the others
  };

  int64_t rows() const { return rows_; }
  int64_t groups() const { return groups_; }

  template <typename Use>
  void each_run(Use use) {
    for (int64_t begin = 0, size = kTogether; begin < rows_; begin += size) {
      while (begin + size > rows_) size /= 2;
      const int64_t at = begin * groups_;
      use(Run{begin, size, numbers_.data() + at * kGroup * 2, scale_.data() + at,
              sum_.data() + at, half_sum_.data() + at * 2});
    }
  }

  // Round a row to scale * (128 * high + low), group by group. NaN and infinity make the scale
  // NaN, so that they are not lost on the way.
  void round(int64_t row, const float* x) {
    Run run{};
    each_run([&](const Run& one) {
      if (one.begin <= row && row < one.begin + one.size) run = one;
    });
    const int64_t r = row - run.begin, size = run.size;
    for (int64_t g = 0; g < groups_; ++g, x += kGroup) {
      Floats largest{}, poison{};
      for (int i = 0; i < kGroup; i += kLanes) {
        const Floats v = load(x + i);
        largest = larger(largest, v < 0.0f ? -v : v);
        poison += v * 0.0f;
      }
      const float most = reduce(largest, [](float a, float b) { return std::max(a, b); });
      const float inverse = most > 0 ? kMost / most : 0.0f;
      int8_t high[kGroup], low[kGroup];
      int32_t halves[2] = {};
      for (int i = 0; i < kGroup; i += kLanes) {
        const Floats v = load(x + i) * inverse;
        const Ints n = __builtin_convertvector(v < 0.0f ? v - 0.5f : v + 0.5f, Ints);
        const Ints upper = (n + (1 << (kLow - 1))) >> kLow;
        *reinterpret_cast<Quarters*>(high + i) = __builtin_convertvector(upper, Quarters);
        *reinterpret_cast<Quarters*>(low + i) =
            __builtin_convertvector(n - (upper << kLow), Quarters);
        halves[i / (kGroup / 2)] += ::sum(n);
      }
      int8_t* to = run.numbers + (g * kBlocks * size + r) * 2 * kBlock;
      for (int b = 0; b < kBlocks; ++b, to += size * 2 * kBlock) {
        std::memcpy(to, high + b * kBlock, kBlock);
        std::memcpy(to + kBlock, low + b * kBlock, kBlock);
      }
      const float scale = most / kMost + ::sum(poison);
      run.scale[g * size + r] = scale;
      run.sum[g * size + r] = scale * (halves[0] + halves[1]);
      run.half_sum[2 * g * size + r] = scale * halves[0];
      run.half_sum[(2 * g + 1) * size + r] = scale * halves[1];
    }
  }

 private:
  const int64_t rows_, groups_;
  std::vector<int8_t> numbers_;
  std::vector<float> scale_, sum_, half_sum_;
};

// Sums of products, and how one more register of numbers and of activations is added to them.
#if defined(__AVX512VNNI__)
using Sums = Ints;
constexpr int kRoom = kBlocks * 255;

inline Sums add_products(Sums sums, Bytes u, Ints x) {
  return (Sums)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)u, (__m512i)x);
}
inline Ints combine(Sums high, Sums low) { return (high << kLow) + low; }
#elif defined(__AVX2__)
typedef int16_t Sums __attribute__((vector_size(kWidth)));  // pairs of products
constexpr int kRoom = (1 << 15) / (2 << 6);  // that many ones times the largest activations

inline Sums add_products(Sums sums, Bytes u, Ints x) {
  return sums + (Sums)_mm256_maddubs_epi16((__m256i)u, (__m256i)x);
}
inline Ints combine(Sums high, Sums low) {
  return (Ints)_mm256_madd_epi16((__m256i)high, _mm256_set1_epi16(1 << kLow)) +
         (Ints)_mm256_madd_epi16((__m256i)low, _mm256_set1_epi16(1));
}
#else
using Sums = Ints;
constexpr int kRoom = kBlocks * 255;

inline Sums add_products(Sums sums, Bytes u, Ints x) {
#if defined(__ARM_FEATURE_DOTPROD)
  return (Sums)vdotq_s32((int32x4_t)sums, (int8x16_t)u, (int8x16_t)x);
#else
  for (int i = 0; i < kWidth; ++i) sums[i / kBlock] += u[i] * reinterpret_cast<int8_t*>(&x)[i];
  return sums;
#endif
}
inline Ints combine(Sums high, Sums low) { return (high << kLow) + low; }
#endif

#if defined(__ARM_FEATURE_DOTPROD) && !defined(__AVX2__)
constexpr bool kSigned = true;  // 8-bit numbers are multiplied as u - 128
#else
constexpr bool kSigned = false;
#endif

inline Bytes shifted_right(Bytes v, int n) {  // what comes from the neighbour is masked off later
  return n >= 0 ? (Bytes)((Pairs)v >> n) : (Bytes)((Pairs)v << -n);
}

// The numbers of one block, for as many rows as a register holds.
template <int kBits>
inline Bytes numbers(const uint8_t* w, int block) {
  const auto at = [w](int i) {
    return *reinterpret_cast<const Bytes*>(w + i * kTile * kBlock);
  };
  if constexpr (kBits == 8) return kSigned ? at(block) ^ 128 : at(block);
  const Bytes two = at(block / 2);
  Bytes u = (block % 2 ? shifted_right(two, 4) : two) & 15;
  if constexpr (kBits == 5) u |= shifted_right(at(4), block - 4) & 16;
  if constexpr (kBits == 6) u |= shifted_right(at(4 + block / 4), 2 * (block % 4) - 4) & 48;
  return u;
}

// Add the products of `kCount` blocks with each row of a run to `sums`.
template <int kBits, int kRows, int kCount>
inline void add_blocks(const uint8_t* w, const int8_t* x, int first, Ints (&sums)[kRows]) {
  constexpr int kStep = std::min(kCount, std::max(1, kRoom / ((1 << kBits) - 1)));
#pragma GCC unroll 8
  for (int begin = first; begin < first + kCount; begin += kStep) {
    Sums high[kRows] = {}, low[kRows] = {};
#pragma GCC unroll 8
    for (int b = begin; b < begin + kStep; ++b) {
      const Bytes u = numbers<kBits>(w, b);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        // One by one: read together, they would take a way through other registers.
        const auto* four = reinterpret_cast<const Word*>(x + (b * kRows + r) * 2 * kBlock);
        high[r] = add_products(high[r], u, Ints{} + four[0]);
        low[r] = add_products(low[r], u, Ints{} + four[1]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) sums[r] += combine(high[r], low[r]);
  }
}

// The products of a tile with a run of `kRows` rows; (kRows, kTile).
template <int kBits, bool kMinima, int kRows>
inline void multiply_tile(const uint8_t* tile, int64_t groups, const Activations::Run& run,
                          float* out) {
  constexpr Form kForm{kBits, kMinima};
  constexpr float kOffset = kBits == 8 && kSigned ? 0 : kForm.offset();
  constexpr int kScales = kForm.scales(), kEach = kBlocks / kScales;
  for (int part = 0; part < kTile; part += kLanes) {
    Floats acc[kRows] = {};
    for (int64_t g = 0; g < groups; ++g) {
      const uint8_t* w = tile + g * kForm.group_bytes();
      const int8_t* x = run.numbers + g * kRows * kGroup * 2;
      const auto* factors = reinterpret_cast<const at::Half*>(w + kForm.number_bytes()) + part;
      const float* scale = run.scale + g * kRows;
#pragma GCC unroll 2
      for (int s = 0; s < kScales; ++s) {
        Ints sums[kRows] = {};
        add_blocks<kBits, kRows, kEach>(w + part * kBlock, x, s * kEach, sums);
        const Floats factor = load(factors + s * kTile);
        const Floats minimum = kMinima ? load(factors + kTile) : factor * -kOffset;
        const float* sum = kScales == 1 ? run.sum + g * kRows : run.half_sum + (2 * g + s) * kRows;
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          acc[r] += __builtin_convertvector(sums[r], Floats) * (factor * scale[r]);
          acc[r] += minimum * sum[r];
        }
      }
    }
    for (int r = 0; r < kRows; ++r) store(acc[r], out + r * kTile + part);
  }
}

struct Packed {
  Tensor blocks;  // (tiles, groups * group_bytes) uint8
  Form form;
  int64_t rows;

  int64_t stride() const { return blocks.size(1); }
  int64_t tiles() const { return blocks.size(0); }
  int64_t inputs() const { return stride() / form.group_bytes() * kGroup; }
  const uint8_t* tile(int64_t t) const { return blocks.const_data_ptr<uint8_t>() + t * stride(); }
  int64_t chunks() const { return up(tiles(), kTilesPerChunk); }

  // Some columns of y, (a.rows(), rows).
  void multiply(int64_t chunk, Activations& a, const float* bias, float* y) const {
    switch (form.bits) {
      case 4: return form.minima ? multiply<4, true>(chunk, a, bias, y)
                                 : multiply<4, false>(chunk, a, bias, y);
      case 5: return form.minima ? multiply<5, true>(chunk, a, bias, y)
                                 : multiply<5, false>(chunk, a, bias, y);
      case 6: return multiply<6, false>(chunk, a, bias, y);
      default: return multiply<8, false>(chunk, a, bias, y);
    }
  }

  // One row's numbers as floats: 32 of a group.
  void unpack_group(int64_t row, int64_t group, float* out) const {
    const uint8_t* p = tile(row / kTile) + group * form.group_bytes();
    const int64_t r = row % kTile;
    const auto* factors = reinterpret_cast<const at::Half*>(p + form.number_bytes()) + r;
    const float minimum = form.minima ? static_cast<float>(factors[kTile]) : 0.0f;
    for (int k = 0; k < kGroup; ++k) {
      const float scale = factors[k / (kGroup / form.scales()) * kTile];
      const int b = k / kBlock, at = kBlock * r + k % kBlock;
      const auto bits = [&](int64_t block, int64_t shift, int mask) {
        return p[block * kTile * kBlock + at] >> shift & mask;
      };
      int64_t u = form.bits == 8 ? bits(b, 0, 255) : bits(b / 2, b % 2 * 4, 15);
      if (form.bits == 5) u |= bits(4, b, 1) << 4;
      if (form.bits == 6) u |= bits(4 + b / 4, b % 4 * 2, 3) << 4;
      out[k] = (u - form.offset()) * scale + minimum;
    }
  }

 private:
  template <int kBits, bool kMinima>
  void multiply(int64_t chunk, Activations& a, const float* bias, float* y) const {
    const int64_t first = chunk * kTilesPerChunk;
    for (int64_t t = first; t < std::min(first + kTilesPerChunk, tiles()); ++t) {
      const int64_t begin = t * kTile, count = std::min(kTile, rows - begin);
      a.each_run([&](const Activations::Run& run) {
        alignas(64) float out[kTogether * kTile];
        const auto go = run.size == 8   ? multiply_tile<kBits, kMinima, 8>
                        : run.size == 4 ? multiply_tile<kBits, kMinima, 4>
                        : run.size == 2 ? multiply_tile<kBits, kMinima, 2>
                                        : multiply_tile<kBits, kMinima, 1>;
        go(tile(t), a.groups(), run, out);
        for (int64_t r = 0; r < run.size; ++r) {
          float* to = y + (run.begin + r) * rows + begin;
          for (int64_t i = 0; i < count; ++i) {
            to[i] = out[r * kTile + i] + (bias ? bias[begin + i] : 0.0f);
          }
        }
      });
    }
  }
};

Packed packed(const Tensor& blocks, int64_t bits, bool minima, int64_t rows) {
  Form::check(bits, minima);
  const Form form{bits, minima};
  TORCH_CHECK(blocks.is_contiguous() && blocks.dim() == 2 && blocks.scalar_type() == at::kByte &&
                  blocks.size(0) == up(rows, kTile) && blocks.size(1) % form.group_bytes() == 0,
              "not packed weights");
  return {blocks, form, rows};
}

// ---- Operators -------------------------------------------------------------------------------

Tensor pack(const Tensor& q, const Tensor& scale, const std::optional<Tensor>& minimum,
            int64_t bits) {
  const Form form{bits, minimum.has_value()};
  Form::check(bits, form.minima);
  TORCH_CHECK(q.dim() == 2 && q.size(1) % kGroup == 0 && q.scalar_type() == at::kByte,
              "q must be (rows, multiple of 32) uint8");
  const int64_t rows = q.size(0), groups = q.size(1) / kGroup;
  const Tensor u = q.contiguous(), s = scale.to(at::kHalf).contiguous(),
               m = minimum ? minimum->to(at::kHalf).contiguous() : s;
  TORCH_CHECK(s.numel() == rows * groups * form.scales() && m.numel() >= rows * groups,
              "there must be a scale for every 32 inputs, or 16 with 6 bits, and as many minima");
  Tensor blocks = at::zeros({up(rows, kTile), groups * form.group_bytes()}, at::kByte);
  const uint8_t* from = u.const_data_ptr<uint8_t>();
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t r = row % kTile;
    uint8_t* p = blocks.data_ptr<uint8_t>() + row / kTile * blocks.size(1);
    for (int64_t g = 0; g < groups; ++g, p += form.group_bytes(), from += kGroup) {
      for (int k = 0; k < kGroup; ++k) {
        const int b = k / kBlock;
        const auto put = [&](int block, int bits) {
          p[block * kTile * kBlock + kBlock * r + k % kBlock] |= bits;
        };
        if (bits == 8) {
          put(b, from[k]);
          continue;
        }
        put(b / 2, (from[k] & 15) << b % 2 * 4);
        if (bits == 5) put(4, (from[k] >> 4 & 1) << b);
        if (bits == 6) put(4 + b / 4, (from[k] >> 4 & 3) << b % 4 * 2);
      }
      auto* factors = reinterpret_cast<at::Half*>(p + form.number_bytes()) + r;
      for (int64_t i = 0; i < form.scales(); ++i, factors += kTile) {
        *factors = s.const_data_ptr<at::Half>()[(row * groups + g) * form.scales() + i];
      }
      if (form.minima) *factors = m.const_data_ptr<at::Half>()[row * groups + g];
    }
  }
  return blocks;
}

Tensor embed(const Tensor& blocks, int64_t bits, bool minima, int64_t rows, const Tensor& ids) {
  const Packed w = packed(blocks, bits, minima, rows);
  const int64_t inputs = w.inputs();
  const Tensor wanted = ids.contiguous();
  Tensor out = at::empty({wanted.numel(), inputs}, at::kFloat);
  for (int64_t i = 0; i < wanted.numel(); ++i) {
    const int64_t row = wanted.const_data_ptr<int64_t>()[i];
    TORCH_CHECK(0 <= row && row < rows, "no row ", row);
    for (int64_t g = 0; g < inputs / kGroup; ++g) {
      w.unpack_group(row, g, out.data_ptr<float>() + i * inputs + g * kGroup);
    }
  }
  return out;
}

Tensor linear(const Tensor& x, const Tensor& blocks, int64_t bits, bool minima, int64_t rows,
              int64_t threads) {
  const Packed w = packed(blocks, bits, minima, rows);
  const Tensor in = x.to(at::kFloat).contiguous();
  TORCH_CHECK(in.dim() == 2 && in.size(1) == w.inputs(), "x must be (T, ", w.inputs(), ")");
  const int64_t T = in.size(0);
  const float* from = in.const_data_ptr<float>();
  Activations a(T, w.inputs());
  Tensor out = at::empty({T, rows}, at::kFloat);
  float* y = out.data_ptr<float>();
  const auto round = [&, from](int64_t chunk) {
    const int64_t end = std::min(T, (chunk + 1) * kRowsPerChunk);
    for (int64_t t = chunk * kRowsPerChunk; t < end; ++t) a.round(t, from + t * w.inputs());
  };
  const auto multiply = [&, y](int64_t chunk) { w.multiply(chunk, a, nullptr, y); };
  const auto job = std::make_shared<Job>(std::vector<Step>{
      {[T] { return up(T, kRowsPerChunk); }, round}, {[&] { return w.chunks(); }, multiply}});
  Pool::get().run(job, threads);
  return out;
}

// ---- The plan of a step ----------------------------------------------------------------------

// Attention of one new position. Rotates queries and keys, writes key and value into the cache,
// and reads the cache in spans, whose softmaxes are merged at the end.
template <typename T>
struct Attention {
  Tensor qkv, out, keys, values, table;  // table: (positions, 1, head_dim / 2) complex64
  std::optional<Tensor> q_norm, k_norm;
  double eps;
  int64_t n_heads, n_kv, dim, window;
  std::shared_ptr<int64_t> position;
  std::vector<float> query, merged, largest, weight, partial;  // rows as `load_two` has them

  int64_t first() const { return window > 0 ? std::max<int64_t>(0, *position + 1 - window) : 0; }
  int64_t spans() const { return up(*position + 1 - first(), kSpan); }
  int64_t chunks() const { return n_kv * spans(); }

  void write() {
    const int64_t at = *position, capacity = keys.size(1);
    float* x = qkv.data_ptr<float>();
    const float* turn =
        reinterpret_cast<const float*>(table.const_data_ptr<c10::complex<float>>()) + at * dim;
    for (int64_t h = 0; h < n_heads + n_kv; ++h) {
      float* head = x + h * dim;
      const auto& norm = h < n_heads ? q_norm : k_norm;
      if (norm) normalise(head, norm->const_data_ptr<float>(), eps, dim, head);
      for (int64_t i = 0; i < dim; i += 2) {
        const float a = head[i], b = head[i + 1];
        head[i] = a * turn[i] - b * turn[i + 1];
        head[i + 1] = a * turn[i + 1] + b * turn[i];
      }
    }
    const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
    for (int64_t h = 0; h < n_heads; ++h) {
      for (int64_t i = 0; i < dim; ++i) query[h * dim + place_of<T>(i, dim)] = x[h * dim + i] * scale;
    }
    for (int64_t h = 0; h < n_kv; ++h) {
      T* k = keys.data_ptr<T>() + (h * capacity + at) * dim;
      T* v = values.data_ptr<T>() + (h * capacity + at) * dim;
      for (int64_t i = 0; i < dim; ++i) {
        k[i] = static_cast<T>(x[(n_heads + h) * dim + i]);
        v[i] = static_cast<T>(x[(n_heads + n_kv + h) * dim + i]);
      }
    }
    const size_t pieces = n_heads * spans();
    if (largest.size() < pieces) {
      largest.resize(pieces);
      weight.resize(pieces);
      partial.resize(pieces * dim);
    }
  }

  void read(int64_t chunk) {
    const int64_t kv = chunk / spans(), shared = n_heads / n_kv;
    for (int64_t g = 0; g < shared; g += 4) {
      const auto go = shared - g >= 4   ? &Attention::read_heads<4>
                      : shared - g == 3 ? &Attention::read_heads<3>
                      : shared - g == 2 ? &Attention::read_heads<2>
                                        : &Attention::read_heads<1>;
      (this->*go)(kv, kv * shared + g, chunk % spans());
    }
  }

  // What `kHeads` heads, which share keys and values, find in a span.
  template <int kHeads>
  void read_heads(int64_t kv, int64_t head, int64_t span) {
    const int64_t begin = first() + span * kSpan, at = (kv * keys.size(1) + begin) * dim;
    const int64_t count = std::min(kSpan, *position + 1 - begin);
    alignas(64) float scores[kHeads][kSpan];
    score<kHeads>(query.data() + head * dim, keys.const_data_ptr<T>() + at, count, scores);
    for (int g = 0; g < kHeads; ++g) {
      const int64_t piece = (head + g) * spans() + span;
      const float most = *std::max_element(scores[g], scores[g] + count);
      std::fill(scores[g] + count, scores[g] + up(count, kLanes) * kLanes, -INFINITY);
      Floats total{};
      for (int64_t s = 0; s < count; s += kLanes) {
        const Floats p = exp_negative(load(scores[g] + s) - most);
        total += p;
        store(p, scores[g] + s);
      }
      largest[piece] = most;
      weight[piece] = sum(total);
    }
    gather<kHeads>(scores, values.const_data_ptr<T>() + at, count,
                   partial.data() + (head * spans() + span) * dim, spans() * dim);
  }

  // Products of queries with `count` keys.
  template <int kHeads>
  void score(const float* q, const T* k, int64_t count, float (*to)[kSpan]) const {
    const int64_t whole = dim / (2 * kLanes) * (2 * kLanes);
    for (int64_t s = 0; s < count; s += kLanes) {
      constexpr int kKeys = 4;  // side by side
      Floats each[kHeads][kLanes];
      for (int j = 0; j < kLanes; j += kKeys) {
        const T* rows[kKeys];
        for (int i = 0; i < kKeys; ++i) rows[i] = k + std::min(s + j + i, count - 1) * dim;
        Floats acc[kHeads][kKeys] = {};
        for (int64_t d = 0; d < whole; d += 2 * kLanes) {
#pragma GCC unroll 4
          for (int i = 0; i < kKeys; ++i) {
            Floats a, b;
            load_two(rows[i] + d, a, b);
#pragma GCC unroll 4
            for (int g = 0; g < kHeads; ++g) {
              acc[g][i] += a * load(q + g * dim + d);
              acc[g][i] += b * load(q + g * dim + d + kLanes);
            }
          }
        }
        for (int g = 0; g < kHeads; ++g) std::copy_n(acc[g], kKeys, each[g] + j);
      }
      for (int g = 0; g < kHeads; ++g) {
        store(sums_of(each[g], std::make_integer_sequence<int, kLanes>{}), to[g] + s);
      }
    }
    if (whole == dim) return;
    for (int g = 0; g < kHeads; ++g) {
      for (int64_t s = 0; s < count; ++s) {
        to[g][s] += dot(q + g * dim + whole, k + s * dim + whole, dim - whole);
      }
    }
  }

  // Sums of `count` values by their weights; a head's results lie `stride` apart.
  template <int kHeads>
  void gather(const float (*p)[kSpan], const T* v, int64_t count, float* to, int64_t stride) const {
    int64_t d = 0;
    for (; d + 2 * kLanes <= dim; d += 2 * kLanes) {
      Floats acc[kHeads][2] = {};
      for (int64_t s = 0; s < count; ++s) {
        Floats a, b;
        load_two(v + s * dim + d, a, b);
#pragma GCC unroll 4
        for (int g = 0; g < kHeads; ++g) {
          acc[g][0] += p[g][s] * a;
          acc[g][1] += p[g][s] * b;
        }
      }
      for (int g = 0; g < kHeads; ++g) {
        store(acc[g][0], to + g * stride + d);
        store(acc[g][1], to + g * stride + d + kLanes);
      }
    }
    for (; d < dim; ++d) {
      for (int g = 0; g < kHeads; ++g) {
        float acc = 0;
        for (int64_t s = 0; s < count; ++s) acc += p[g][s] * static_cast<float>(v[s * dim + d]);
        to[g * stride + d] = acc;
      }
    }
  }

  void merge() {
    const int64_t n = spans();
    float* y = out.data_ptr<float>();
    for (int64_t head = 0; head < n_heads; ++head, y += dim) {
      const float* most = largest.data() + head * n;
      const float top = *std::max_element(most, most + n);
      float total = 0;
      std::fill(merged.begin(), merged.end(), 0.0f);
      for (int64_t s = 0; s < n; ++s) {
        const float share = std::exp(most[s] - top);
        total += share * weight[head * n + s];
        const float* from = partial.data() + (head * n + s) * dim;
        for (int64_t i = 0; i < dim; ++i) merged[i] += share * from[i];
      }
      for (int64_t i = 0; i < dim; ++i) y[i] = merged[place_of<T>(i, dim)] / total;
    }
  }
};

// A recorded step: each method adds an operation and returns the buffer its result will be in.
class Plan : public torch::CustomClassHolder {
 public:
  Tensor embed_rows(const Tensor& weight) {
    Tensor out = floats(weight.size(1));
    once([=, this] {
      const auto row = weight[*token_].to(at::kFloat);
      std::memcpy(out.data_ptr<float>(), row.const_data_ptr<float>(), row.nbytes());
    });
    return out;
  }

  Tensor embed_packed(const Tensor& blocks, int64_t bits, bool minima, int64_t rows) {
    const Packed w = packed(blocks, bits, minima, rows);
    Tensor out = floats(w.inputs());
    once([=, this] {
      for (int64_t g = 0; g < w.inputs() / kGroup; ++g) {
        w.unpack_group(*token_, g, out.data_ptr<float>() + g * kGroup);
      }
    });
    return out;
  }

  Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
    Tensor out = floats(x.numel());
    once([=] {
      normalise(x.const_data_ptr<float>(), weight.const_data_ptr<float>(), eps, x.numel(),
                out.data_ptr<float>());
    });
    return out;
  }

  Tensor linear_packed(const Tensor& x, const Tensor& blocks, int64_t bits, bool minima,
                       int64_t rows, const std::optional<Tensor>& bias) {
    const Packed w = packed(blocks, bits, minima, rows);
    TORCH_CHECK(x.numel() == w.inputs(), "x must have ", w.inputs(), " numbers");
    Tensor out = floats(rows);
    const auto a = std::make_shared<Activations>(1, w.inputs());
    once([=] { a->round(0, x.const_data_ptr<float>()); });
    const std::optional<Tensor> added = as_floats(bias);
    steps_.push_back({[w] { return w.chunks(); }, [=](int64_t chunk) {
                        w.multiply(chunk, *a, added ? added->const_data_ptr<float>() : nullptr,
                                   out.data_ptr<float>());
                      }});
    return out;
  }

  Tensor linear_dense(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
    TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous() && x.numel() == weight.size(1),
                "x must have as many numbers as the weight has columns");
    Tensor out = floats(weight.size(0));
    const std::optional<Tensor> added = as_floats(bias);
    switch (weight.scalar_type()) {
      case at::kFloat: dense<float>(x, weight, added, out); break;
      case at::kBFloat16: dense<at::BFloat16>(x, weight, added, out); break;
      case at::kHalf: dense<at::Half>(x, weight, added, out); break;
      default: TORCH_CHECK(false, "dense weights are float32, float16 or bfloat16");
    }
    return out;
  }

  Tensor attend(const Tensor& qkv, const Tensor& keys, const Tensor& values, const Tensor& table,
                const std::optional<Tensor>& q_norm, const std::optional<Tensor>& k_norm,
                double eps, int64_t n_heads, int64_t window) {
    TORCH_CHECK(keys.dim() == 3 && keys.is_contiguous() && values.is_contiguous() &&
                    qkv.numel() == (n_heads + 2 * keys.size(0)) * keys.size(2),
                "queries, keys and cache do not fit together");
    Tensor out = floats(n_heads * keys.size(2));
    const auto add = [&](auto number) {
      using T = decltype(number);
      const int64_t n_kv = keys.size(0), dim = keys.size(2);
      auto a = std::make_shared<Attention<T>>(Attention<T>{
          qkv, out, keys, values, table, q_norm, k_norm, eps, n_heads, n_kv, dim, window, position_,
          std::vector<float>(n_heads * dim), std::vector<float>(dim), {}, {}, {}});
      once([a] { a->write(); });
      steps_.push_back({[a] { return a->chunks(); }, [a](int64_t chunk) { a->read(chunk); }});
      once([a] { a->merge(); });
    };
    switch (keys.scalar_type()) {
      case at::kFloat: add(float{}); break;
      case at::kBFloat16: add(at::BFloat16{}); break;
      case at::kHalf: add(at::Half{}); break;
      default: TORCH_CHECK(false, "the cache is float32, float16 or bfloat16");
    }
    return out;
  }

  Tensor swiglu(const Tensor& gate_up) {
    const int64_t n = gate_up.numel() / 2;
    Tensor out = floats(n);
    once([=] {
      const float *gate = gate_up.const_data_ptr<float>(), *linear = gate + n;
      float* to = out.data_ptr<float>();
      int64_t i = 0;
      for (; i + kLanes <= n; i += kLanes) {
        const Floats g = load(gate + i);
        const Floats e = exp_negative(g < 0.0f ? g : -g);  // e^-|g|
        const Floats s = (g < 0.0f ? e : 1.0f + Floats{}) / (1.0f + e);
        store(g * s * load(linear + i), to + i);
      }
      for (; i < n; ++i) to[i] = gate[i] / (1.0f + std::exp(-gate[i])) * linear[i];
    });
    return out;
  }

  Tensor add(const Tensor& x, const Tensor& y) {
    Tensor out = floats(x.numel());
    once([=] {
      const float *a = x.const_data_ptr<float>(), *b = y.const_data_ptr<float>();
      float* to = out.data_ptr<float>();
      for (int64_t i = 0, n = x.numel(); i < n; ++i) to[i] = a[i] + b[i];
    });
    return out;
  }

  Tensor join(const std::vector<Tensor>& parts) {
    int64_t n = 0;
    for (const Tensor& part : parts) n += part.numel();
    Tensor out = floats(n);
    once([=] {
      float* to = out.data_ptr<float>();
      for (const Tensor& part : parts) {
        to = std::copy_n(part.const_data_ptr<float>(), part.numel(), to);
      }
    });
    return out;
  }

  // Run the step for one token at one position. Not while another thread runs the same plan.
  void run(int64_t token, int64_t position, int64_t threads) {
    if (!job_) job_ = std::make_shared<Job>(std::move(steps_));
    *token_ = token;
    *position_ = position;
    Pool::get().run(job_, threads);
  }

 private:
  static Tensor floats(int64_t n) { return at::empty({1, n}, at::kFloat); }

  static std::optional<Tensor> as_floats(const std::optional<Tensor>& t) {
    return t ? std::optional<Tensor>(t->to(at::kFloat).contiguous()) : std::nullopt;
  }

  void once(std::function<void()> run) {
    steps_.push_back({[] { return 1; }, [run = std::move(run)](int64_t) { run(); }});
  }

  template <typename T>
  void dense(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
             const Tensor& out) {
    const int64_t rows = weight.size(0), inputs = weight.size(1);
    steps_.push_back({[=] { return up(rows, kRowsPerChunk); }, [=](int64_t chunk) {
                        const float* from = x.const_data_ptr<float>();
                        const float* b = bias ? bias->const_data_ptr<float>() : nullptr;
                        float* to = out.data_ptr<float>();
                        const int64_t end = std::min(rows, (chunk + 1) * kRowsPerChunk);
                        for (int64_t r = chunk * kRowsPerChunk; r < end; ++r) {
                          to[r] = dot(from, weight.const_data_ptr<T>() + r * inputs, inputs) +
                                  (b ? b[r] : 0.0f);
                        }
                      }});
  }

  const std::shared_ptr<int64_t> token_ = std::make_shared<int64_t>(0);
  const std::shared_ptr<int64_t> position_ = std::make_shared<int64_t>(0);
  std::vector<Step> steps_;
  std::shared_ptr<Job> job_;
};

}  // namespace

TORCH_LIBRARY(kvchat, m) {
  m.class_<Plan>("Plan")
      .def(torch::init<>())
      .def("embed_rows", &Plan::embed_rows)
      .def("embed_packed", &Plan::embed_packed)
      .def("rms_norm", &Plan::rms_norm)
      .def("linear_packed", &Plan::linear_packed)
      .def("linear_dense", &Plan::linear_dense)
      .def("attend", &Plan::attend)
      .def("swiglu", &Plan::swiglu)
      .def("add", &Plan::add)
      .def("join", &Plan::join)
      .def("run", &Plan::run);
  m.def("pack(Tensor q, Tensor scale, Tensor? minimum, int bits) -> Tensor");
  m.def("embed(Tensor blocks, int bits, bool minima, int rows, Tensor ids) -> Tensor");
  m.def("linear(Tensor x, Tensor blocks, int bits, bool minima, int rows, int threads) -> Tensor");
}

TORCH_LIBRARY_IMPL(kvchat, CPU, m) {
  m.impl("pack", pack);
  m.impl("embed", embed);
  m.impl("linear", linear);
}
