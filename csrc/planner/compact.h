// Compacts rows; core/search/compact.py is the reference.
#pragma once

#include <algorithm>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

#include "timeline.h"

namespace zb {

class Compactor {
 public:
  explicit Compactor(const Problem& problem)
      : p(problem),
        m(problem.num_microbatches),
        look_ahead(kLookAhead * std::max(kOfRanks, problem.num_ranks) / kOfRanks),
        begin(row_begins(problem)),
        delta(3 * problem.num_stages),
        landed(problem.num_stages * m),
        num_landed(problem.num_stages),
        arrivals(begin.back()),
        arrived(3 * problem.num_stages),
        count(3 * problem.num_stages),
        kept(problem.num_ranks),
        free_at(problem.num_ranks),
        position(problem.num_ranks),
        codes(problem.num_ranks) {
    for (int c = 0; c < 3 * p.num_stages; ++c) codes[p.rank[c]].push_back(c);
  }

  // Reorders rows in place; returns false if they deadlock or do not fit.
  bool run(int32_t* rows_, const int32_t* most_held_, double haste, bool backwards_) {
    reset(rows_, most_held_, haste, backwards_);
    for (int r = 0; r < p.num_ranks; ++r) events.push({0.0, r});
    while (!events.empty()) {
      const auto [now, rank] = events.top();
      events.pop();
      if (now < free_at[rank] || position[rank] == begin[rank + 1]) continue;
      const int head = rows[position[rank]];
      double soon = count[head] < arrived[head] ? arrivals[head * m + count[head]] : kNever;
      if (delta[head] > 0 && kept[rank] + delta[head] > p.limit[rank]) soon = fused_at(head, kept[rank]);
      const int code = soon <= now + kSlack ? head : overtake(rank, now, soon);
      if (code == kNone) {
        if (soon < kNever) events.push({soon, rank});
        continue;
      }
      double end = now + p.duration[code];
      int sender = code;
      const bool is_fused = delta[code] > 0 && kept[rank] + delta[code] > p.limit[rank];
      kept[rank] += delta[code];
      ++count[code];
      ++position[rank];
      if (is_fused) {
        const int second = code + closes;
        pull(rank, second, position[rank]);
        end += p.duration[second];
        sender = backwards ? second : code;
        kept[rank] += delta[second];
        ++count[second];
        ++position[rank];
      }
      free_at[rank] = end;
      events.push({end, rank});
      const int kind = code % 3, wgrad = p.wgrad[code], fed = p.successor[sender];
      if (!backwards && wgrad != kNone) arrivals[wgrad * m + arrived[wgrad]++] = end;
      if (backwards && kind == kWgrad) gate(code - kWgrad, end);
      if (fed == kNone) continue;
      const double arrival = end + p.hop[fed];
      if (backwards && sender % 3 == kForward && fed % 3 == kForward) {
        landed[fed / 3 * m + num_landed[fed / 3]++] = arrival;
        gate(fed, 0.0);
      } else {
        arrivals[fed * m + arrived[fed]++] = arrival;
      }
      const int other = p.rank[fed];
      if (other != rank && free_at[other] <= arrival) events.push({arrival, other});
    }
    for (int r = 0; r < p.num_ranks; ++r)
      if (position[r] < begin[r + 1]) return false;
    return true;
  }

 private:
  using Event = std::pair<double, int>;
  static constexpr double kSlack = 1e-9;
  static constexpr int kLookAhead = 36, kOfRanks = 32;

  void reset(int32_t* rows_, const int32_t* most_held_, double haste, bool backwards_) {
    rows = rows_;
    most_held = most_held_;
    late = 1.0 - haste;
    backwards = backwards_;
    opens = backwards ? kWgrad : kBackward;
    closes = backwards ? kForward - kWgrad : kWgrad - kBackward;
    delta = p.delta;
    std::fill(num_landed.begin(), num_landed.end(), 0);
    std::fill(arrived.begin(), arrived.end(), 0);
    std::fill(count.begin(), count.end(), 0);
    std::fill(kept.begin(), kept.end(), 0.0);
    std::fill(free_at.begin(), free_at.end(), 0.0);
    std::copy(begin.begin(), begin.end() - 1, position.begin());
    if (backwards) {
      for (int s = 0; s < p.num_stages; ++s) {
        if (p.source[3 * s] == kNone) {
          std::fill_n(landed.begin() + s * m, m, 0.0);
          num_landed[s] = m;
        }
        const double whole = p.delta[3 * s], wgrad = -p.delta[3 * s + kWgrad];
        delta[3 * s] = whole - wgrad;
        delta[3 * s + kBackward] = -whole;
        delta[3 * s + kWgrad] = wgrad;
        arrived[3 * s + kWgrad] = m;
        std::fill_n(arrivals.begin() + (3 * s + kWgrad) * m, m, 0.0);
      }
    } else {
      for (int c = 0; c < 3 * p.num_stages; ++c) {
        if (p.source[c] != kNone) continue;
        std::fill_n(arrivals.begin() + c * m, m, 0.0);
        arrived[c] = m;
      }
    }
  }

  void gate(int code, double wgrad_end) {
    const int n = arrived[code];
    if (n < num_landed[code / 3] && n < count[code + kWgrad])
      arrivals[code * m + arrived[code]++] = std::max(landed[code / 3 * m + n], wgrad_end);
  }

  // Whether the first pass of a fused backward may be `code`.
  bool opens_pair(int code) const { return p.may_fuse && code % 3 == opens && p.delta[code / 3 * 3 + kBackward] > 0; }

  // Returns when the input of a fused backward arrives that `code` is the first pass of; never if it is not one, or does
  // not fit next to `held`.
  double fused_at(int code, double held) const {
    const int second = code + closes, n = count[code], stage = code / 3;
    if (!opens_pair(code) || count[second] != n) return kNever;
    const bool fits = held + (delta[code] + delta[second]) <= p.limit[p.rank[code]];
    if (!fits || n >= (backwards ? num_landed[stage] : arrived[code])) return kNever;
    return backwards ? landed[stage * m + n] : arrivals[code * m + n];
  }

  bool fuses(int code, double peak, double now, double soon) const {
    if (fused_at(code, peak) > now + kSlack) return false;
    return now + late * (p.duration[code] + p.duration[code + closes]) <= soon + kSlack;
  }

  // Moves the next pass of `code` to the place `to`.
  void pull(int rank, int code, int to) {
    int32_t* const place = std::find(rows + to, rows + begin[rank + 1], code);
    std::rotate(rows + to, place, place + 1);
  }

  int overtake(int rank, double now, double soon) {
    ready.clear();
    for (int code : codes[rank]) {
      const int n = count[code];
      const bool on_time = n < arrived[code] && arrivals[code * m + n] <= now + kSlack &&
                           now + late * p.duration[code] <= soon + kSlack;
      if (on_time && (code % 3 != kForward || n - count[code + 1] < most_held[code / 3])) ready.push_back(code);
    }
    if (ready.empty()) return kNone;
    const int at = position[rank];
    double held = kept[rank], peak = held;
    const int last = std::min(at + look_ahead, begin[rank + 1]);
    for (int place = at; place < last; ++place) {
      const int code = rows[place];
      const auto found = place > at ? std::find(ready.begin(), ready.end(), code) : ready.end();
      if (found != ready.end()) {
        const bool is_fused = delta[code] > 0 && peak + delta[code] > p.limit[rank];
        if (!is_fused || fuses(code, peak, now, soon)) {
          std::rotate(rows + at, rows + place, rows + place + 1);
          if (is_fused) pull(rank, code + closes, at + 1);
          return code;
        }
        ready.erase(found);
      }
      held += delta[code];
      // What a fused backward holds within is not counted.
      if (held <= p.limit[rank] || !opens_pair(code) || place + 1 == begin[rank + 1] || rows[place + 1] != code + closes)
        peak = std::max(peak, held);
    }
    return kNone;
  }

  const Problem& p;
  const int m, look_ahead;
  int32_t* rows = nullptr;
  const int32_t* most_held = nullptr;
  double late = 1.0;
  bool backwards = false;
  int opens = kBackward, closes = kWgrad - kBackward;
  const std::vector<int> begin;
  std::vector<double> delta, landed;
  std::vector<int> num_landed;
  std::vector<double> arrivals;
  std::vector<int> arrived, count;
  std::vector<double> kept, free_at;
  std::vector<int> position;
  std::priority_queue<Event, std::vector<Event>, std::greater<Event>> events;
  std::vector<std::vector<int>> codes;
  std::vector<int> ready;
};

}  // namespace zb
