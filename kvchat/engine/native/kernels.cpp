// The decode step on a CPU: group-quantised matrix products, attention over the KV cache, and a
// Plan that runs a whole step, recorded once, as one call.
//
// Weights are numbers of 4 or 8 bits in groups of 32 inputs: w = u * scale + minimum, u unsigned.
// Activations are rounded to 14 bits per group, as two signed bytes of 7 (high * 128 + low), so that
// products run in integer dot-product instructions and still lose next to nothing. Of 7 bits, the
// sums of two products with any weight fit into the 16 bits that AVX2 adds them in.
//
// Packed weights (see `pack`): tiles of 16 rows; a tile holds its groups one after another, each
// as numbers, then 16 float16 scales, and for 4 bits 16 float16 minima. Numbers come in blocks of
// 64 bytes, four inputs of 16 rows; with 4 bits a byte's low half is of one block and its high
// half of the next. 8-bit weights are symmetric: minimum = -128 * scale and is not stored.

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
constexpr int64_t kTilesPerChunk = 2;  // what a thread takes at a time
constexpr int64_t kRowsPerChunk = 32;  // of dense weights
constexpr int64_t kSpan = 128;         // cached positions that one piece of attention covers

int64_t number_bytes(int64_t bits) { return kTile * kGroup * bits / 8; }
int64_t group_bytes(int64_t bits) { return number_bytes(bits) + (bits == 4 ? 4 : 2) * kTile; }
int64_t up(int64_t n, int64_t unit) { return (n + unit - 1) / unit; }

// ---- Vectors: the compiler's own, so that one source serves every processor -------------------

typedef float Floats __attribute__((vector_size(64), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(64), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(64), aligned(4)));
typedef uint16_t Shorts __attribute__((vector_size(32), aligned(2)));
typedef int8_t Bytes __attribute__((vector_size(16), aligned(1)));
typedef uint8_t Numbers __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint8_t Block __attribute__((vector_size(64), aligned(1), may_alias));

inline Floats load(const float* p) { return *reinterpret_cast<const Floats*>(p); }

inline Floats load(const at::BFloat16* p) {
  const Words wide = __builtin_convertvector(*reinterpret_cast<const Shorts*>(p), Words) << 16;
  return reinterpret_cast<const Floats&>(wide);
}

inline Floats load(const at::Half* p) {
#if defined(__AVX512F__)
  const __m512 wide = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return reinterpret_cast<const Floats&>(wide);
#elif defined(__F16C__)
  const __m256 parts[] = {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
                          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
  return *reinterpret_cast<const Floats*>(parts);
#else
  Floats wide;
  for (int i = 0; i < 16; ++i) wide[i] = static_cast<float>(p[i]);
  return wide;
#endif
}

inline Floats load(const int8_t* p) {
  return __builtin_convertvector(*reinterpret_cast<const Bytes*>(p), Floats);
}

inline void store(Floats v, at::BFloat16* p) {
  const Words bits = reinterpret_cast<const Words&>(v);
  const Words nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // a tie goes to the even one
  const Words nan = Words{} + 0x7fc0;  // rounded like a number, it might become one
  *reinterpret_cast<Shorts*>(p) = __builtin_convertvector(v == v ? nearest : nan, Shorts);
}

// As many floats as a register holds: sums that grow in a loop stay in one.
#if defined(__AVX512F__)
using Lanes = Floats;
#elif defined(__AVX2__)
typedef float Lanes __attribute__((vector_size(32), aligned(4)));
#else
typedef float Lanes __attribute__((vector_size(16), aligned(4)));
#endif
constexpr int64_t kLanes = sizeof(Lanes) / sizeof(float);

template <typename T>
inline Lanes lanes(const T* p) {
  if constexpr (kLanes == 16) {
    const Floats wide = load(p);
    return reinterpret_cast<const Lanes&>(wide);
  } else if constexpr (std::is_same_v<T, float>) {
    return *reinterpret_cast<const Lanes*>(p);
  } else {
    Lanes wide;
    for (int i = 0; i < kLanes; ++i) wide[i] = static_cast<float>(p[i]);
    return wide;
  }
}

template <typename V>
inline float sum(V v) {
  constexpr int kCount = sizeof(V) / sizeof(float);
  float part[kCount];
  std::memcpy(part, &v, sizeof v);
  for (int width = kCount / 2; width; width /= 2) {
    for (int i = 0; i < width; ++i) part[i] += part[i + width];
  }
  return part[0];
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
  Lanes a{}, b{};
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    a += lanes(x + i) * lanes(w + i);
    b += lanes(x + i + kLanes) * lanes(w + i + kLanes);
  }
  for (; i + kLanes <= n; i += kLanes) a += lanes(x + i) * lanes(w + i);
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

struct Activations {
  explicit Activations(int64_t n) : high(n), low(n), scale(n / kGroup), total(n / kGroup) {}

  static constexpr int kLow = 7;  // bits of the lower byte
  static constexpr float kMost = 63 * 128 + 63;

  // Round n floats to scale * (128 * high + low), group by group. NaN and infinity make the scale
  // NaN, so that they are not lost on the way.
  void round(const float* x) {
    for (size_t g = 0; g < scale.size(); ++g, x += kGroup) {
      float largest = 0, poison = 0;
      for (int i = 0; i < kGroup; ++i) {
        largest = std::max(largest, std::fabs(x[i]));
        poison += x[i] * 0.0f;
      }
      const float inverse = largest > 0 ? kMost / largest : 0.0f;
      int32_t all = 0;
      int8_t* h = high.data() + g * kGroup;
      int8_t* l = low.data() + g * kGroup;
      for (int i = 0; i < kGroup; ++i) {
        const int32_t v = static_cast<int32_t>(x[i] * inverse + (x[i] < 0 ? -0.5f : 0.5f));
        const int32_t upper = (v + 64) >> kLow;
        h[i] = static_cast<int8_t>(upper);
        l[i] = static_cast<int8_t>(v - (upper << kLow));
        all += v;
      }
      scale[g] = largest / kMost + poison;
      total[g] = all;
    }
  }

  std::vector<int8_t> high, low;
  std::vector<float> scale;
  std::vector<int32_t> total;
};

// Sums of u * activation over one group, for the 16 rows of a tile.
template <int kBits>
inline Ints group_sums(const uint8_t* w, const int8_t* high, const int8_t* low) {
  constexpr int kBlocks = kBits == 4 ? 4 : 8;
  Ints sums;
#if defined(__AVX512VNNI__)
  __m512i upper = _mm512_setzero_si512(), lower = _mm512_setzero_si512();
  const auto four = [](const int8_t* p) {
    int32_t v;
    std::memcpy(&v, p, 4);
    return _mm512_set1_epi32(v);
  };
  const __m512i nibble = _mm512_set1_epi8(15);
  for (int b = 0; b < kBlocks; ++b) {
    const __m512i u = _mm512_loadu_si512(w + 64 * b);
    if constexpr (kBits == 4) {
      const __m512i first = _mm512_and_si512(u, nibble);
      const __m512i second = _mm512_and_si512(_mm512_srli_epi16(u, 4), nibble);
      upper = _mm512_dpbusd_epi32(upper, first, four(high + 8 * b));
      lower = _mm512_dpbusd_epi32(lower, first, four(low + 8 * b));
      upper = _mm512_dpbusd_epi32(upper, second, four(high + 8 * b + 4));
      lower = _mm512_dpbusd_epi32(lower, second, four(low + 8 * b + 4));
    } else {
      upper = _mm512_dpbusd_epi32(upper, u, four(high + 4 * b));
      lower = _mm512_dpbusd_epi32(lower, u, four(low + 4 * b));
    }
  }
  const __m512i both = _mm512_add_epi32(_mm512_slli_epi32(upper, Activations::kLow), lower);
  sums = reinterpret_cast<const Ints&>(both);
#elif defined(__AVX2__)
  // Halves of 8 rows. Products of bytes are added in pairs to 16 bits, where those of 4-bit numbers
  // have room for a whole group.
  const __m256i nibble = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  const __m256i upper_ones = _mm256_set1_epi16(1 << Activations::kLow);
  const auto four = [](const int8_t* p) {
    int32_t v;
    std::memcpy(&v, p, 4);
    return _mm256_set1_epi32(v);
  };
  const auto both = [&](__m256i upper, __m256i lower) {
    return _mm256_add_epi32(_mm256_madd_epi16(upper, upper_ones), _mm256_madd_epi16(lower, ones));
  };
  for (int half = 0; half < 2; ++half) {
    const auto* p = reinterpret_cast<const __m256i*>(w + 32 * half);
    __m256i total = _mm256_setzero_si256();
    if constexpr (kBits == 4) {
      __m256i upper = _mm256_setzero_si256(), lower = _mm256_setzero_si256();
      const auto add = [&](__m256i u, int at) {
        upper = _mm256_add_epi16(upper, _mm256_maddubs_epi16(u, four(high + at)));
        lower = _mm256_add_epi16(lower, _mm256_maddubs_epi16(u, four(low + at)));
      };
      for (int b = 0; b < kBlocks; ++b) {
        const __m256i u = _mm256_loadu_si256(p + 2 * b);
        add(_mm256_and_si256(u, nibble), 8 * b);
        add(_mm256_and_si256(_mm256_srli_epi16(u, 4), nibble), 8 * b + 4);
      }
      total = both(upper, lower);
    } else {
      for (int b = 0; b < kBlocks; ++b) {
        const __m256i u = _mm256_loadu_si256(p + 2 * b);
        total = _mm256_add_epi32(total, both(_mm256_maddubs_epi16(u, four(high + 4 * b)),
                                             _mm256_maddubs_epi16(u, four(low + 4 * b))));
      }
    }
    std::memcpy(reinterpret_cast<char*>(&sums) + 32 * half, &total, 32);
  }
#elif defined(__ARM_FEATURE_DOTPROD)
  const auto four = [](const int8_t* p) {
    int32_t v;
    std::memcpy(&v, p, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(v));
  };
  for (int quarter = 0; quarter < 4; ++quarter) {
    int32x4_t upper = vdupq_n_s32(0), lower = vdupq_n_s32(0), all = vdupq_n_s32(0);
    const auto add = [&](uint8x16_t u, const int8_t* h, const int8_t* l) {
      const int8x16_t v = vreinterpretq_s8_u8(u);
      upper = vdotq_s32(upper, v, four(h));
      lower = vdotq_s32(lower, v, four(l));
    };
    for (int b = 0; b < kBlocks; ++b) {
      const uint8x16_t u = vld1q_u8(w + 64 * b + 16 * quarter);
      if constexpr (kBits == 4) {
        add(vandq_u8(u, vdupq_n_u8(15)), high + 8 * b, low + 8 * b);
        add(vshrq_n_u8(u, 4), high + 8 * b + 4, low + 8 * b + 4);
      } else {  // u - 128 as a signed byte; the 128 comes back below
        add(veorq_u8(u, vdupq_n_u8(128)), high + 4 * b, low + 4 * b);
        const int8x16_t one = vdupq_n_s8(1);
        all = vaddq_s32(all, vdotq_s32(vshlq_n_s32(vdotq_s32(vdupq_n_s32(0), one, four(high + 4 * b)), Activations::kLow),
                                       one, four(low + 4 * b)));
      }
    }
    int32x4_t both = vaddq_s32(vshlq_n_s32(upper, Activations::kLow), lower);
    both = vaddq_s32(both, vshlq_n_s32(all, 7));
    std::memcpy(reinterpret_cast<char*>(&sums) + 16 * quarter, &both, 16);
  }
#else
  sums = Ints{};
  for (int b = 0; b < kBlocks; ++b) {
    for (int r = 0; r < kTile; ++r) {
      for (int j = 0; j < 4; ++j) {
        const int u = w[64 * b + 4 * r + j];
        if constexpr (kBits == 4) {
          sums[r] += (u & 15) * (128 * high[8 * b + j] + low[8 * b + j]);
          sums[r] += (u >> 4) * (128 * high[8 * b + 4 + j] + low[8 * b + 4 + j]);
        } else {
          sums[r] += u * (128 * high[4 * b + j] + low[4 * b + j]);
        }
      }
    }
  }
#endif
  return sums;
}

// The products of `kTiles` tiles that lie `stride` bytes apart with one activation vector.
template <int kBits, int kTiles>
inline void multiply_tiles(const uint8_t* w, int64_t stride, const Activations& a, Floats* out) {
  Floats acc[kTiles] = {};
  const int64_t step = group_bytes(kBits);
  for (size_t g = 0; g < a.scale.size(); ++g) {
    for (int t = 0; t < kTiles; ++t) {
      const uint8_t* p = w + t * stride + g * step;
      Ints sums = group_sums<kBits>(p, a.high.data() + g * kGroup, a.low.data() + g * kGroup);
      const auto* scales = reinterpret_cast<const at::Half*>(p + number_bytes(kBits));
      if constexpr (kBits == 8) sums -= 128 * a.total[g];
      acc[t] += __builtin_convertvector(sums, Floats) * (load(scales) * a.scale[g]);
      if constexpr (kBits == 4) acc[t] += load(scales + kTile) * (a.scale[g] * a.total[g]);
    }
  }
  for (int t = 0; t < kTiles; ++t) out[t] = acc[t];
}

struct Packed {
  Tensor blocks;  // (tiles, groups * group_bytes) uint8
  int64_t bits, rows;

  int64_t stride() const { return blocks.size(1); }
  int64_t tiles() const { return blocks.size(0); }
  int64_t inputs() const { return stride() / group_bytes(bits) * kGroup; }
  const uint8_t* tile(int64_t t) const { return blocks.const_data_ptr<uint8_t>() + t * stride(); }
  int64_t chunks() const { return up(tiles(), kTilesPerChunk); }

  void multiply(int64_t chunk, const Activations& a, const float* bias, float* y) const {
    const int64_t first = chunk * kTilesPerChunk;
    Floats out[kTilesPerChunk];
    const bool whole = first + kTilesPerChunk <= tiles();
    if (bits == 4) {
      whole ? multiply_tiles<4, 2>(tile(first), stride(), a, out)
            : multiply_tiles<4, 1>(tile(first), stride(), a, out);
    } else {
      whole ? multiply_tiles<8, 2>(tile(first), stride(), a, out)
            : multiply_tiles<8, 1>(tile(first), stride(), a, out);
    }
    const int64_t begin = first * kTile;
    const int64_t n = std::min(rows - begin, (whole ? 2 : 1) * kTile);
    const float* values = reinterpret_cast<const float*>(out);
    for (int64_t i = 0; i < n; ++i) y[begin + i] = values[i] + (bias ? bias[begin + i] : 0.0f);
  }

  // A tile's numbers as they are in its rows, which lie `inputs` apart; `count` rows are wanted.
  void unpack_tile(int64_t t, int64_t count, at::BFloat16* to) const {
    const int64_t inputs = this->inputs();
    const uint8_t* p = tile(t);
    for (int64_t g = 0; g < inputs / kGroup; ++g, p += group_bytes(bits), to += kGroup) {
      uint32_t blocks[kGroup / 4][kTile], lines[2][kTile][4];  // four inputs a word
      for (int64_t b = 0; b < kGroup / 4; b += 2) {
        if (bits == 4) {
          const Block two = *reinterpret_cast<const Block*>(p + 32 * b);
          *reinterpret_cast<Block*>(blocks[b]) = two & 15;
          *reinterpret_cast<Block*>(blocks[b + 1]) = two >> 4;
        } else {
          std::memcpy(blocks[b], p + 64 * b, 128);
        }
      }
      for (int half = 0; half < 2; ++half) {
        for (int r = 0; r < kTile; ++r) {
          for (int b = 0; b < 4; ++b) lines[half][r][b] = blocks[4 * half + b][r];
        }
      }
      const auto* scales = reinterpret_cast<const at::Half*>(p + number_bytes(bits));
      const Floats scale = load(scales);
      const Floats minimum = bits == 4 ? load(scales + kTile) : -128.0f * scale;
      for (int64_t r = 0; r < count; ++r) {
        for (int half = 0; half < 2; ++half) {
          const Numbers u = *reinterpret_cast<const Numbers*>(lines[half][r]);
          store(__builtin_convertvector(u, Floats) * scale[r] + minimum[r],
                to + r * inputs + 16 * half);
        }
      }
    }
  }

  // One row's numbers as floats: 32 of a group.
  void unpack_group(int64_t row, int64_t group, float* out) const {
    const uint8_t* p = tile(row / kTile) + group * group_bytes(bits);
    const int64_t r = row % kTile;
    const auto* scales = reinterpret_cast<const at::Half*>(p + number_bytes(bits));
    const float scale = scales[r];
    const float minimum = bits == 4 ? static_cast<float>(scales[kTile + r]) : -128.0f * scale;
    for (int k = 0; k < kGroup; ++k) {
      const int u = bits == 4 ? p[64 * (k / 8) + 4 * r + k % 4] >> (k / 4 % 2 ? 4 : 0) & 15
                              : p[64 * (k / 4) + 4 * r + k % 4];
      out[k] = u * scale + minimum;
    }
  }
};

Packed packed(const Tensor& blocks, int64_t bits, int64_t rows) {
  TORCH_CHECK(bits == 4 || bits == 8, "weights have 4 or 8 bits");
  TORCH_CHECK(blocks.is_contiguous() && blocks.dim() == 2 && blocks.scalar_type() == at::kByte &&
                  blocks.size(0) == up(rows, kTile) && blocks.size(1) % group_bytes(bits) == 0,
              "not packed weights");
  return {blocks, bits, rows};
}

void in_parallel(int64_t count, int64_t threads, std::function<void(int64_t)> run) {
  const auto job = std::make_shared<Job>(
      std::vector<Step>{{[count] { return count; }, std::move(run)}});
  Pool::get().run(job, threads);
}

// ---- Operators -------------------------------------------------------------------------------

Tensor pack(const Tensor& q, const Tensor& scale, const Tensor& minimum, int64_t bits) {
  const int64_t rows = q.size(0), groups = q.size(1) / kGroup;
  TORCH_CHECK(bits == 4 || bits == 8, "weights have 4 or 8 bits");
  TORCH_CHECK(q.dim() == 2 && q.size(1) % kGroup == 0 && q.scalar_type() == at::kByte,
              "q must be (rows, multiple of 32) uint8");
  const Tensor u = q.contiguous(), s = scale.to(at::kHalf).contiguous(),
               m = minimum.to(at::kHalf).contiguous();
  TORCH_CHECK(s.numel() == rows * groups && (bits == 8 || m.numel() == rows * groups),
              "scale and minimum must be (rows, groups)");
  Tensor blocks = at::zeros({up(rows, kTile), groups * group_bytes(bits)}, at::kByte);
  uint8_t* to = blocks.data_ptr<uint8_t>();
  const uint8_t* numbers = u.const_data_ptr<uint8_t>();
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t r = row % kTile;
    for (int64_t g = 0; g < groups; ++g) {
      uint8_t* p = to + (row / kTile * groups + g) * group_bytes(bits);
      const uint8_t* from = numbers + (row * groups + g) * kGroup;
      for (int k = 0; k < kGroup; ++k) {
        if (bits == 4) {
          p[64 * (k / 8) + 4 * r + k % 4] |= (from[k] & 15) << (k / 4 % 2 ? 4 : 0);
        } else {
          p[64 * (k / 4) + 4 * r + k % 4] = from[k];
        }
      }
      auto* scales = reinterpret_cast<at::Half*>(p + number_bytes(bits));
      scales[r] = s.const_data_ptr<at::Half>()[row * groups + g];
      if (bits == 4) scales[kTile + r] = m.const_data_ptr<at::Half>()[row * groups + g];
    }
  }
  return blocks;
}

Tensor unpack(const Tensor& blocks, int64_t bits, int64_t rows, int64_t threads) {
  const Packed w = packed(blocks, bits, rows);
  const int64_t inputs = w.inputs();
  Tensor out = at::empty({rows, inputs}, at::kBFloat16);
  at::BFloat16* to = out.data_ptr<at::BFloat16>();
  in_parallel(w.tiles(), threads, [&, to](int64_t t) {
    w.unpack_tile(t, std::min(kTile, rows - t * kTile), to + t * kTile * inputs);
  });
  return out;
}

Tensor embed(const Tensor& blocks, int64_t bits, int64_t rows, const Tensor& ids) {
  const Packed w = packed(blocks, bits, rows);
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

Tensor linear(const Tensor& x, const Tensor& blocks, int64_t bits, int64_t rows, int64_t threads) {
  const Packed w = packed(blocks, bits, rows);
  const Tensor in = x.to(at::kFloat).contiguous();
  TORCH_CHECK(in.dim() == 2 && in.size(1) == w.inputs(), "x must be (T, ", w.inputs(), ")");
  const int64_t T = in.size(0);
  std::vector<Activations> rounded(T, Activations(w.inputs()));
  for (int64_t t = 0; t < T; ++t) rounded[t].round(in.const_data_ptr<float>() + t * w.inputs());
  Tensor out = at::empty({T, rows}, at::kFloat);
  float* y = out.data_ptr<float>();
  in_parallel(w.chunks(), threads, [&, y](int64_t chunk) {
    for (int64_t t = 0; t < T; ++t) w.multiply(chunk, rounded[t], nullptr, y + t * rows);
  });
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
  std::vector<float> query, largest, weight, partial;

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
    for (int64_t i = 0; i < n_heads * dim; ++i) query[i] = x[i] * scale;
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
    const int64_t n = spans(), kv = chunk / n, span = chunk % n, capacity = keys.size(1);
    const int64_t begin = first() + span * kSpan;
    const int64_t count = std::min(kSpan, *position + 1 - begin);
    const int64_t shared = n_heads / n_kv;
    const T* k = keys.const_data_ptr<T>() + (kv * capacity + begin) * dim;
    const T* v = values.const_data_ptr<T>() + (kv * capacity + begin) * dim;
    for (int64_t g = 0; g < shared; ++g) {
      const int64_t head = kv * shared + g, piece = head * n + span;
      const float* q = query.data() + head * dim;
      alignas(64) float scores[kSpan];
      float most = -INFINITY;
      for (int64_t s = 0; s < count; ++s) {
        scores[s] = dot(q, k + s * dim, dim);
        most = std::max(most, scores[s]);
      }
      for (int64_t s = count; s < up(count, 16) * 16; ++s) scores[s] = -INFINITY;
      Floats total{};
      for (int64_t s = 0; s < count; s += 16) {
        const Floats p = exp_negative(load(scores + s) - most);
        total += p;
        *reinterpret_cast<Floats*>(scores + s) = p;
      }
      float* sum_of = partial.data() + piece * dim;
      for (int64_t d = 0; d < dim; d += kLanes) {
        if (d + kLanes <= dim) {
          Lanes acc{};
          for (int64_t s = 0; s < count; ++s) acc += scores[s] * lanes(v + s * dim + d);
          *reinterpret_cast<Lanes*>(sum_of + d) = acc;
        } else {
          for (int64_t i = d; i < dim; ++i) {
            sum_of[i] = 0;
            for (int64_t s = 0; s < count; ++s) {
              sum_of[i] += scores[s] * static_cast<float>(v[s * dim + i]);
            }
          }
        }
      }
      largest[piece] = most;
      weight[piece] = sum(total);
    }
  }

  void merge() {
    const int64_t n = spans();
    float* y = out.data_ptr<float>();
    for (int64_t head = 0; head < n_heads; ++head, y += dim) {
      const float* most = largest.data() + head * n;
      const float top = *std::max_element(most, most + n);
      float total = 0;
      std::fill(y, y + dim, 0.0f);
      for (int64_t s = 0; s < n; ++s) {
        const float share = std::exp(most[s] - top);
        total += share * weight[head * n + s];
        const float* from = partial.data() + (head * n + s) * dim;
        for (int64_t i = 0; i < dim; ++i) y[i] += share * from[i];
      }
      for (int64_t i = 0; i < dim; ++i) y[i] /= total;
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

  Tensor embed_packed(const Tensor& blocks, int64_t bits, int64_t rows) {
    const Packed w = packed(blocks, bits, rows);
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

  Tensor linear_packed(const Tensor& x, const Tensor& blocks, int64_t bits, int64_t rows,
                       const std::optional<Tensor>& bias) {
    const Packed w = packed(blocks, bits, rows);
    TORCH_CHECK(x.numel() == w.inputs(), "x must have ", w.inputs(), " numbers");
    Tensor out = floats(rows);
    const auto a = std::make_shared<Activations>(w.inputs());
    once([=] { a->round(x.const_data_ptr<float>()); });
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
          std::vector<float>(n_heads * dim), {}, {}, {}});
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
      for (; i + 16 <= n; i += 16) {
        const Floats g = load(gate + i);
        const Floats e = exp_negative(g < 0.0f ? g : -g);  // e^-|g|
        const Floats s = (g < 0.0f ? e : 1.0f + Floats{}) / (1.0f + e);
        *reinterpret_cast<Floats*>(to + i) = g * s * load(linear + i);
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
      .def("run", &Plan::run);
  m.def("pack(Tensor q, Tensor scale, Tensor minimum, int bits) -> Tensor");
  m.def("unpack(Tensor blocks, int bits, int rows, int threads) -> Tensor");
  m.def("embed(Tensor blocks, int bits, int rows, Tensor ids) -> Tensor");
  m.def("linear(Tensor x, Tensor blocks, int bits, int rows, int threads) -> Tensor");
}

TORCH_LIBRARY_IMPL(kvchat, CPU, m) {
  m.impl("pack", pack);
  m.impl("unpack", unpack);
  m.impl("embed", embed);
  m.impl("linear", linear);
}
