// Times and cost of rows; search/rows.py and search/evaluate.py are the references.
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
        done(problem),
        at(problem.num_ranks),
        free_at(problem.num_ranks) {}

  Cost evaluate(const int32_t* rows) {
    for (int r = 0; r < p.num_ranks; ++r) {
      double kept = 0.0;
      for (int i = begin[r]; i < begin[r + 1]; ++i) {
        const double change = p.delta[rows[i]];
        kept += change;
        if (change > 0 && kept > p.limit[r]) return {};
      }
    }
    if (!run(rows)) return {};
    Cost result{-kNever, 0.0};
    for (int r = 0; r < p.num_ranks; ++r) {
      const double cost = free_at[r] - p.origin[r];
      result.cost = std::max(result.cost, cost);
      result.mean += cost;
    }
    result.mean /= p.num_ranks;
    return result;
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
        const double arrival = done.arrival(code);
        if (arrival == kNever) break;
        now = std::max(now, arrival);
        starts[place] = now;
        now += p.duration[code];
        const int n = done.add(code, now);
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

 private:
  Done done;
  std::vector<int> at;
  std::vector<double> free_at;
};

}  // namespace zb
