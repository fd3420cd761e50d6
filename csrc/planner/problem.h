// The problem that the loops work on; search/problem.py.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

extern "C" {

// One scheduling problem; arrays by code, except limit, work and origin, which are by rank.
struct zb_problem {
  int32_t num_ranks, num_stages, num_microbatches;
  const int32_t* rank;
  const int32_t* source;
  const int32_t* successor;
  const int32_t* wgrad;
  const int32_t* receiver;
  const double* duration;
  const double* hop;
  const double* delta;
  const double* limit;
  const double* work;
  const double* origin;
};

}  // extern "C"

namespace zb {

constexpr int kNone = -1;
constexpr int kForward = 0, kBackward = 1, kWgrad = 2;
constexpr double kNever = std::numeric_limits<double>::infinity();

// Where each rank's row begins.
inline std::vector<int> row_begins(const zb_problem& p) {
  std::vector<int> begin(p.num_ranks + 1, 0);
  for (int c = 0; c < 3 * p.num_stages; ++c) begin[p.rank[c] + 1] += p.num_microbatches;
  for (int r = 0; r < p.num_ranks; ++r) begin[r + 1] += begin[r];
  return begin;
}

struct Cost {
  double cost = kNever, mean = kNever;
};

}  // namespace zb
