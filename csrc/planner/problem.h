// The problem that the loops work on; see core/search/problem.py.
#pragma once

#include <limits>
#include <vector>

namespace zb {

constexpr int kNone = -1;
constexpr int kForward = 0, kBackward = 1, kWgrad = 2;
constexpr double kNever = std::numeric_limits<double>::infinity();

// One scheduling problem; columns are indexed by code, except limit, work and origin, which are indexed by rank.
struct Problem {
  int num_ranks, num_stages, num_microbatches;
  std::vector<int> rank, source, successor, wgrad, receiver;
  std::vector<double> duration, hop, delta;
  std::vector<double> limit, work, origin;
  bool may_fuse = false;  // whether the B of a stage leaves more memory for its W than it frees
};

// Returns the index at which the row of each rank begins.
inline std::vector<int> row_begins(const Problem& p) {
  std::vector<int> begin(p.num_ranks + 1, 0);
  for (int c = 0; c < 3 * p.num_stages; ++c) begin[p.rank[c] + 1] += p.num_microbatches;
  for (int r = 0; r < p.num_ranks; ++r) begin[r + 1] += begin[r];
  return begin;
}

struct Cost {
  double cost = kNever, mean = kNever;
};

}  // namespace zb
