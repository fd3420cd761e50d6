// Refills rows; core/search/refill.py is the reference.
#pragma once

#include <algorithm>
#include <array>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

#include "done.h"
#include "timeline.h"

namespace zb {

// Until the last F of a rank on the first and on the last rank, and after it on the first and on the last rank.
using Eagerness = std::array<double, 4>;

class Refiller {
 public:
  explicit Refiller(const Problem& problem)
      : p(problem),
        begin(row_begins(problem)),
        done(problem),
        position(problem.num_ranks),
        placed(problem.num_ranks),
        free_at(problem.num_ranks),
        kept(problem.num_ranks),
        spare(problem.num_ranks),
        warm(problem.num_ranks),
        cool(problem.num_ranks),
        last_forward(problem.num_ranks),
        first_pending(problem.num_ranks),
        last_pending(problem.num_ranks),
        pending(begin.back() / 3) {}

  // Writes the new rows into `full`; returns false if they deadlock or do not fit.
  bool run(const int32_t* rows, const Eagerness& eagerness, double target, int32_t* full) {
    done.clear();
    for (int r = 0; r < p.num_ranks; ++r) {
      free_at[r] = kept[r] = 0.0;
      position[r] = placed[r] = begin[r];
      first_pending[r] = last_pending[r] = begin[r] / 3;
      spare[r] = target + p.origin[r] - p.work[r];
      const double part = static_cast<double>(r) / std::max(1, p.num_ranks - 1);
      warm[r] = eagerness[0] + part * (eagerness[1] - eagerness[0]);
      cool[r] = eagerness[2] + part * (eagerness[3] - eagerness[2]);
      for (last_forward[r] = begin[r + 1] - 1; rows[last_forward[r]] % 3 != kForward;) --last_forward[r];
    }
    for (int rank = done.next_rank(); rank != kNone; rank = done.next_rank())
      if (!advance(rank, rows, full)) return false;
    for (int r = 0; r < p.num_ranks; ++r) {
      if (position[r] < begin[r + 1]) return false;
      std::copy(pending.begin() + first_pending[r], pending.begin() + last_pending[r], full + placed[r]);
    }
    return true;
  }

 private:
  static constexpr double kSlack = 1e-9;

  // Runs one rank until the input of a pass is missing; returns false if memory does not suffice.
  bool advance(int rank, const int32_t* rows, int32_t* full) {
    double now = free_at[rank], held = kept[rank];
    const double limit = p.limit[rank];
    int& head = first_pending[rank];
    int& tail = last_pending[rank];
    int& out = placed[rank];
    auto run_wgrad = [&] {
      const int wgrad = pending[head++];
      full[out++] = wgrad;
      now += p.duration[wgrad];
      held += p.delta[wgrad];
    };
    int at = position[rank];
    for (; at < begin[rank + 1]; ++at) {
      const int code = rows[at];
      if (code % 3 == kWgrad) continue;
      const double arrival = done.arrival(code);
      if (arrival == kNever) break;
      const double change = p.delta[code];
      while (head < tail && (now + p.duration[pending[head]] <= arrival + kSlack || (change > 0 && held + change > limit)))
        run_wgrad();
      held += change;
      const bool is_fused = change > 0 && held > limit;
      if (is_fused && code % 3 == kForward) return false;
      if (arrival > now) {
        const double gap = arrival - now;
        const double share = at <= last_forward[rank] ? warm[rank] : cool[rank];
        if (head < tail && (gap > share * p.duration[pending[head]] || gap > spare[rank] + kSlack)) run_wgrad();
        if (arrival > now) {
          spare[rank] -= arrival - now;
          now = arrival;
        }
      }
      full[out++] = code;
      now += p.duration[code];
      if (p.wgrad[code] != kNone) pending[tail++] = p.wgrad[code];
      if (is_fused) run_wgrad();
      done.add(code, now);
    }
    position[rank] = at;
    free_at[rank] = now;
    kept[rank] = held;
    return true;
  }

  const Problem& p;
  const std::vector<int> begin;
  Done done;
  std::vector<int> position, placed;
  std::vector<double> free_at, kept, spare, warm, cool;
  std::vector<int> last_forward;
  std::vector<int> first_pending, last_pending, pending;
};

}  // namespace zb
