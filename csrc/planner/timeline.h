// Times and cost of rows; core/search/rows.py and core/search/evaluate.py are the references.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "done.h"
#include "problem.h"

namespace zb {

class Timeline {
 public:
  explicit Timeline(const Problem& problem)
      : p(problem),
        m(problem.num_microbatches),
        begin(row_begins(problem)),
        starts(begin.back()),
        number(begin.back()),
        places(begin.back()),
        fused(begin.back()),
        waiting(problem.num_stages),
        done(problem),
        at(problem.num_ranks),
        free_at(problem.num_ranks) {}

  Cost evaluate(const int32_t* rows) {
    if (!fits(rows) || !run(rows)) return {};
    Cost result{-kNever, 0.0};
    for (int r = 0; r < p.num_ranks; ++r) {
      const double cost = free_at[r] - p.origin[r];
      result.cost = std::max(result.cost, cost);
      result.mean += cost;
    }
    result.mean /= p.num_ranks;
    return result;
  }

  // Marks the B of fused backwards for `run`; returns false if the rows do not fit in memory, and then marks none.
  bool fits(const int32_t* rows) {
    if (p.may_fuse) {
      std::fill(fused.begin(), fused.end(), 0);
      std::fill(waiting.begin(), waiting.end(), 0);
    }
    for (int r = 0; r < p.num_ranks; ++r) {
      double kept = 0.0;
      for (int i = begin[r]; i < begin[r + 1]; ++i) {
        const int code = rows[i];
        const double change = p.delta[code];
        kept += change;
        if (change > 0 && kept > p.limit[r]) {
          const bool is_pair = code % 3 == kBackward && i + 1 < begin[r + 1] && rows[i + 1] == code + 1;
          if (!is_pair || waiting[code / 3]) {
            std::fill(fused.begin(), fused.end(), 0);
            return false;
          }
          fused[i] = 1;
        }
        if (p.may_fuse && code % 3 != kForward) waiting[code / 3] += code % 3 == kBackward ? 1 : -1;
      }
    }
    return true;
  }

  // Runs each pass as early as possible; returns whether all passes ran, without a deadlock.
  bool run(const int32_t* rows) {
    done.clear();
    for (int r = 0; r < p.num_ranks; ++r) {
      at[r] = begin[r];
      free_at[r] = 0.0;
    }
    for (int rank = done.next_rank(); rank != kNone; rank = done.next_rank()) {
      double now = free_at[rank];
      for (; at[rank] < begin[rank + 1]; ++at[rank]) {
        const int place = at[rank], code = rows[place];
        // The input of the second pass of a fused backward comes from the first, which ends with the second.
        const bool after_fused = p.may_fuse && place > begin[rank] && fused[place - 1];
        if (!after_fused) {
          const double arrival = done.arrival(code);
          if (arrival == kNever) break;
          now = std::max(now, arrival);
        }
        starts[place] = now;
        now += p.duration[code];
        const bool ends = !p.may_fuse || !fused[place];
        const int n = ends ? done.add(code, now) : done.number(code);
        if (after_fused) done.add(code - 1, now);
        number[place] = n;
        places[code * m + n] = place;
      }
      free_at[rank] = now;
    }
    return std::equal(at.begin(), at.end(), begin.begin() + 1);
  }

  const Problem& p;
  const int m;
  const std::vector<int> begin;
  std::vector<double> starts;
  std::vector<int> number, places;
  std::vector<char> fused;

 private:
  std::vector<int> waiting;
  Done done;
  std::vector<int> at;
  std::vector<double> free_at;
};

}  // namespace zb
