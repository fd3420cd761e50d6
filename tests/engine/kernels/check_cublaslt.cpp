// Checks that csrc/wgrad/cublaslt.cpp describes products correctly to a fake cuBLASLt. Prints what is wrong.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "../../csrc/wgrad/cublaslt.h"
#include "fake_cublaslt.h"

// A matrix (rows, columns) of small integers, row- or column-major, with `pad` elements between its rows or columns.
struct Filled {
  int64_t rows, columns, leading;
  bool is_row_major;
  std::vector<float> data;

  Filled(int64_t rows, int64_t columns, bool row_major, int64_t pad)
      : rows(rows), columns(columns), leading((row_major ? columns : rows) + pad), is_row_major(row_major) {
    data.assign(leading * (row_major ? rows : columns), 99);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j) at(i, j) = std::rand() % 7 - 3;
  }

  float& at(int64_t i, int64_t j) { return data[is_row_major ? i * leading + j : i + j * leading]; }
  zb::Matrix matrix() const { return {data.data(), leading, is_row_major}; }
};

zb::Gemm float_gemm(const Filled& x, const Filled& dy, Filled& grad, std::vector<float>* sums) {
  const int64_t tokens = x.rows, in = x.columns, out = dy.columns;
  constexpr zb::Dtype kFloat = zb::Dtype::kFloat;
  float* where = sums == nullptr ? nullptr : sums->data();
  return {x.matrix(), dy.matrix(), grad.data.data(), grad.leading, where, tokens, in, out, kFloat, kFloat, false};
}

bool is_right(int64_t tokens, int64_t in, int64_t out, bool x_row_major, bool dy_row_major, int64_t pad, bool bias) {
  Filled x(tokens, in, x_row_major, pad), dy(tokens, out, dy_row_major, pad), grad(out, in, true, pad);
  Filled expected = grad;
  std::vector<float> sums(out, -1), expected_sums(out, bias ? 0 : -1);
  for (int64_t o = 0; o < out; ++o)
    for (int64_t k = 0; k < tokens; ++k) {
      if (bias) expected_sums[o] += dy.at(k, o);
      for (int64_t i = 0; i < in; ++i) expected.at(o, i) += dy.at(k, o) * x.at(k, i);
    }
  const zb::Gemm gemm = float_gemm(x, dy, grad, bias ? &sums : nullptr);
  const zb::Outcome outcome = zb::queue_gemm(gemm, 0, nullptr, nullptr);
  return outcome.result == zb::Result::kQueued && outcome.sums_bias == bias && grad.data == expected.data &&
         sums == expected_sums;
}

int num_wrong_layouts() {
  int wrong = 0;
  for (int64_t tokens : {1, 3, 5})
    for (int64_t in : {1, 2, 5})
      for (int64_t out : {1, 3, 4})
        for (int flags = 0; flags < 16; ++flags)
          wrong += !is_right(tokens, in, out, flags & 1, flags & 2, flags & 4 ? 2 : 0, flags & 8);
  return wrong;
}

// Each operand is promised the alignment that its own pointer has, up to 256 bytes.
int num_wrong_alignments() {
  alignas(1024) static float memory[3][512];
  int wrong = 0;
  for (uint32_t x : {4, 8, 16, 64, 256, 512})
    for (uint32_t dy : {4, 32, 128, 512})
      for (uint32_t grad : {4, 16, 256}) {
        constexpr zb::Dtype kFloat = zb::Dtype::kFloat;
        const zb::Gemm gemm{
            {memory[0] + x / 4, 4, true}, {memory[1] + dy / 4, 3, true}, memory[2] + grad / 4, 4, nullptr, 6, 4, 3,
            kFloat, kFloat, false};
        const uint32_t expected[] = {x < 256 ? x : 256, dy < 256 ? dy : 256, grad, grad};
        uint32_t promised[4];
        const bool is_queued = zb::queue_gemm(gemm, 0, nullptr, nullptr).result == zb::Result::kQueued;
        fake_get_alignments(promised);
        wrong += !is_queued || std::memcmp(promised, expected, sizeof(expected)) != 0;
      }
  return wrong;
}

// bfloat16 has 8 bits, so the upper 16 of a float32 are exact for small integers, but sums of products are rounded.
uint16_t upper_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<uint16_t>(bits >> 16);
}

// A narrow gradient is accumulated in float32 and rounded once.
int num_wrong_roundings() {
  constexpr int kTokens = 40, kIn = 4, kOut = 3;
  int wrong = 0;
  for (int round = 0; round < 20; ++round) {
    std::vector<uint16_t> x(kTokens * kIn), dy(kTokens * kOut), grad(kOut * kIn, upper_half(1));
    std::vector<float> sums(kOut * kIn, 1);
    for (int k = 0; k < kTokens; ++k) {
      float rows[kIn];
      for (int i = 0; i < kIn; ++i) x[k * kIn + i] = upper_half(rows[i] = std::rand() % 31 - 15);
      for (int o = 0; o < kOut; ++o) {
        const float value = std::rand() % 31 - 15;
        dy[k * kOut + o] = upper_half(value);
        for (int i = 0; i < kIn; ++i) sums[o * kIn + i] += value * rows[i];
      }
    }
    constexpr zb::Dtype kBFloat16 = zb::Dtype::kBFloat16;
    const zb::Gemm gemm{{x.data(), kIn, true}, {dy.data(), kOut, true}, grad.data(), kIn, nullptr, kTokens, kIn, kOut,
                        kBFloat16, kBFloat16, false};
    wrong += zb::queue_gemm(gemm, 0, nullptr, nullptr).result != zb::Result::kQueued;
    for (int i = 0; i < kOut * kIn; ++i) {
      const uint32_t widened = uint32_t(grad[i]) << 16;
      float got;
      std::memcpy(&got, &widened, sizeof(got));
      int exponent;
      std::frexp(sums[i], &exponent);
      wrong += std::abs(got - sums[i]) > std::ldexp(1.f, exponent - 9);  // half a unit in the last of 8 places
    }
  }
  return wrong;
}

// What happens to one product, of which cuBLASLt refuses some or all kernels: twice, since refusals are remembered.
int num_wrong_after(Fault fault, zb::Result expected, bool bias, bool sums_bias, int num_calls, int num_calls_later) {
  static int64_t tokens = 10;
  ++tokens;  // a shape that has not occurred
  int wrong = 0;
  fake_set_fault(fault);
  for (int wanted : {num_calls, num_calls_later}) {
    Filled x(tokens, 4, true, 0), dy(tokens, 3, true, 0), grad(3, 4, true, 0);
    const Filled before = grad;
    std::vector<float> sums(3, -1);
    const int num_before = fake_num_calls();
    const zb::Outcome outcome = zb::queue_gemm(float_gemm(x, dy, grad, bias ? &sums : nullptr), 0, nullptr, nullptr);
    wrong += outcome.result != expected || outcome.sums_bias != sums_bias;
    wrong += (outcome.why == nullptr) != (expected == zb::Result::kQueued);
    wrong += (grad.data == before.data) != (expected != zb::Result::kQueued);
    wrong += (sums[0] == -1 && sums[1] == -1 && sums[2] == -1) != !sums_bias;
    wrong += fake_num_calls() - num_before != wanted;
  }
  fake_set_fault(kNone);
  return wrong;
}

int main() {
  using zb::Result;
  int wrong = 0;
  const auto check = [&wrong](const char* what, int count) {
    if (count != 0) std::printf("%s: %d wrong\n", what, count);
    wrong += count;
  };
  check("layouts", num_wrong_layouts());
  check("alignments", num_wrong_alignments());
  check("roundings", num_wrong_roundings());
  check("no fault", num_wrong_after(kNone, Result::kQueued, true, true, 1, 1));
  check("no kernel for the bias", num_wrong_after(kNoBiasKernel, Result::kQueued, true, false, 1, 1));
  check("kernel for the bias refused", num_wrong_after(kBiasRefused, Result::kQueued, true, false, 2, 1));
  check("everything refused", num_wrong_after(kEverythingRefused, Result::kRefused, true, false, 2, 0));
  check("everything refused, no bias", num_wrong_after(kEverythingRefused, Result::kRefused, false, false, 1, 0));
  check("nothing found", num_wrong_after(kNothingFound, Result::kRefused, true, false, 0, 0));
  check("execution fails", num_wrong_after(kExecutionFails, Result::kFailed, true, false, 1, 1));
  std::printf("%d wrong\n", wrong);
  return wrong != 0;
}
