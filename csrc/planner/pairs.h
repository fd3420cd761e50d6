// Single moves that improve an order of pairs, as core/search/pair_moves.py.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "dice.h"

namespace zb {

// An op: the codes (kind * stages + stage) * microbatches + microbatch of its passes (0 F, 1 B, 2 W, 3 BW); -1 for none.
using PairedOp = std::pair<int, int>;
using PairedRow = std::vector<PairedOp>;
using PairedRows = std::vector<PairedRow>;

class PairPlanner {
 public:
  // times: per kind of op, as core/search/pair_loops.py numbers them, the twelve numbers of its Step.
  PairPlanner(
      int stages, int microbatches, int most_chunks, std::vector<int> chunk, std::vector<double> times,
      std::vector<double> forward_hop, std::vector<double> backward_hop, std::vector<double> change)
      : S(stages), m(microbatches), chunks(most_chunks), chunk(std::move(chunk)), times(std::move(times)),
        forward_hop(std::move(forward_hop)), backward_hop(std::move(backward_hop)), change(std::move(change)) {}

  double length(const PairedRows& rows, bool of_span) const { return run(rows, of_span, nullptr); }

  std::vector<std::pair<int, int>> critical(const PairedRows& rows) const {
    std::vector<std::pair<int, int>> path;
    run(rows, false, &path);
    return path;
  }

  std::pair<double, PairedRows> improve(PairedRows now, double limit, bool of_span, int tries, uint64_t seed) const {
    Dice dice(seed);
    double now_ms = length(now, of_span), best_ms = now_ms;
    PairedRows best = now;
    auto path = critical(now);
    for (int number = 0; number < tries; ++number) {
      auto [rank, place] = path[dice.below(static_cast<int>(path.size()))];
      auto row = moved(now[rank], place, dice);
      if (!row || !in_order(*row) || peak(*row) > limit) continue;
      std::swap(now[rank], *row);
      double ms = length(now, of_span);
      double share = heat * (1.0 - static_cast<double>(number) / static_cast<double>(tries)) * dice.uniform();
      if (ms <= now_ms * (1.0 + share) || ms < best_ms) {
        now_ms = ms;
        path = critical(now);
        if (ms < best_ms) best = now, best_ms = ms;
      } else {
        std::swap(now[rank], *row);
      }
    }
    return {best_ms, best};
  }

 private:
  static constexpr int F = 0, B = 1, W = 2, BW = 3;
  static constexpr int near = 6, far = 48;
  static constexpr double heat = 2e-3, never = std::numeric_limits<double>::infinity();
  using Moved = std::optional<PairedRow>;

  int kind(int code) const { return code / (S * m); }
  int stage(int code) const { return code / m % S; }
  int unit(int code) const { return code % (S * m); }  // the stage and the microbatch
  int as(int code, int other) const { return other * S * m + unit(code); }
  static int last(const PairedOp& op) { return op.second >= 0 ? op.second : op.first; }
  int place_of(int code) const { return kind(code) == BW ? as(code, B) : code; }

  const double* times_of(const PairedOp& op) const {
    int own = kind(op.first) * S + stage(op.first);
    if (op.second >= 0)
      own = 4 * S + (stage(op.first) * chunks + chunk[stage(op.second)]) * 2 + (kind(op.second) == BW);
    return &times[12 * static_cast<size_t>(own)];
  }

  static double at(const double* of, double computed, double sent, double ready) {
    return std::max({of[0] + computed, of[1] + sent, of[2] + ready});
  }

  double peak(const PairedRow& row) const {
    double now = 0.0, most = 0.0;
    for (const auto& op : row)
      for (int code : {op.first, op.second})
        if (code >= 0) {
          now += change[kind(code) * S + stage(code)];
          if (now > most) most = now;
        }
    return most;
  }

  // The inputs of a pass, as places and hops.
  int needs(int code, std::array<std::pair<int, double>, 2>& found) const {
    int own = unit(code), s = stage(code), k = kind(code);
    if (k == F) {
      if (s == 0) return 0;
      found[0] = {own - m, forward_hop[s]};
      return 1;
    }
    if (k == W) {
      found[0] = {S * m + own, 0.0};
      return 1;
    }
    found[0] = {own, 0.0};
    if (s + 1 == S) return 1;
    found[1] = {S * m + own + m, backward_hop[s]};
    return 2;
  }

  struct State {
    double computed = 0.0, sent = 0.0, ready = 0.0, begun = -1.0;
  };

  double run(const PairedRows& rows, bool of_span, std::vector<std::pair<int, int>>* path) const {
    using Place = std::pair<int, int>;
    int R = static_cast<int>(rows.size());
    std::vector<double> made(3 * static_cast<size_t>(S) * m, -1.0);
    std::vector<int> waiting(made.size(), -1), todo(R), position(R, 0);
    std::vector<State> states(R);
    std::vector<std::vector<Place>> before(path ? R : 0);
    std::vector<Place> maker(path ? made.size() : 0);
    for (int rank = 0; rank < R; ++rank) todo[rank] = rank;
    while (!todo.empty()) {
      int rank = todo.back();
      todo.pop_back();
      const auto& row = rows[rank];
      auto& state = states[rank];
      for (; position[rank] < static_cast<int>(row.size()); ++position[rank]) {
        const auto& op = row[position[rank]];
        double ready = state.ready;
        int missing = -1;
        Place source{position[rank] ? rank : -1, position[rank] - 1};
        for (int code : {op.first, op.second}) {
          std::array<std::pair<int, double>, 2> inputs;
          int count = code < 0 ? 0 : needs(code, inputs);
          for (int number = 0; number < count && missing < 0; ++number) {
            auto [place, hop] = inputs[number];
            if (made[place] < 0) {
              missing = place;
            } else if (made[place] + hop > ready) {
              ready = made[place] + hop;
              if (path) source = maker[place];
            }
          }
        }
        if (missing >= 0) {
          waiting[missing] = rank;
          break;
        }
        const double* of = times_of(op);
        if (state.begun < 0) state.begun = ready;
        if (path) {
          bool is_late = std::max(of[0] + state.computed, of[1] + state.sent) < of[2] + ready;
          before[rank].push_back(is_late || !position[rank] ? source : Place{rank, position[rank] - 1});
        }
        for (int number = 0; number < 2; ++number) {
          int code = number ? op.second : op.first;
          if (code < 0) continue;
          int output = place_of(code);
          made[output] = at(of + 6 + 3 * number, state.computed, state.sent, ready);
          if (path) maker[output] = {rank, position[rank]};
          if (waiting[output] >= 0) {
            todo.push_back(waiting[output]);
            waiting[output] = -1;
          }
        }
        double computed = at(of, state.computed, state.sent, ready);
        state.sent = at(of + 3, state.computed, state.sent, ready);
        state.computed = computed;
        state.ready = ready;
      }
    }
    for (int rank = 0; rank < R; ++rank)
      if (position[rank] < static_cast<int>(rows[rank].size())) return never;
    double most = -never;
    int last = 0;
    for (int rank = 0; rank < R; ++rank) {
      const auto& state = states[rank];
      double end = std::max(state.computed, state.sent);
      if (end > std::max(states[last].computed, states[last].sent)) last = rank;
      most = std::max(most, end - (of_span ? state.begun : 0.0));
    }
    if (path)
      for (Place on{last, static_cast<int>(rows[last].size()) - 1}; on.first >= 0; on = before[on.first][on.second])
        path->push_back(on);
    return most;
  }

  Moved moved(const PairedRow& row, int place, Dice& dice) const {
    switch (dice.below(8)) {
      case 0:
      case 1: return shift(row, place, dice);
      case 2: return separate(row, place, dice);
      case 3: return join(row, place);
      case 4: return exchange(row, place, dice);
      case 5: return delay(row, place, dice);
      case 6: return fuse(row, place);
      default: return advance(row, place, dice);
    }
  }

  bool can_pair(int one, int other) const {
    return kind(one) == F && (kind(other) == B || kind(other) == BW) && unit(one) != unit(other);
  }

  bool in_order(const PairedRow& row) const {
    std::vector<int> forwards(S, 0), backwards(S, 0), weights(S, 0);
    for (const auto& op : row)
      for (int code : {op.first, op.second}) {
        if (code < 0) continue;
        int k = kind(code), s = stage(code), own = code % m;
        if (k == F) {
          if (forwards[s]++ != own) return false;
          continue;
        }
        if (k != W && (backwards[s]++ != own || forwards[s] <= own)) return false;
        if (k != B && (weights[s]++ != own || backwards[s] <= own)) return false;
      }
    return true;
  }

  static PairedRow with_moved(const PairedRow& row, int place, int to) {
    PairedRow own = row;
    own.erase(own.begin() + place);
    own.insert(own.begin() + std::min(to, static_cast<int>(own.size())), row[place]);
    return own;
  }

  Moved shift(const PairedRow& row, int place, Dice& dice) const {
    int other = place + dice.below(2 * near + 1) - near;
    if (other == place || other < 0 || other >= static_cast<int>(row.size())) return {};
    return with_moved(row, place, other);
  }

  Moved separate(const PairedRow& row, int place, Dice& dice) const {
    auto [one, other] = row[place];
    if (other < 0) return {};
    if (!dice.below(2)) std::swap(one, other);
    PairedRow own = row;
    own[place] = {one, -1};
    own.insert(own.begin() + place + 1, {other, -1});
    return own;
  }

  Moved join(const PairedRow& row, int place) const {
    int own = row[place].first;
    if (row[place].second >= 0 || kind(own) == W) return {};
    for (int by = 1; by <= near; ++by)
      for (int other : {place + by, place - by}) {
        if (other < 0 || other >= static_cast<int>(row.size()) || row[other].second >= 0) continue;
        int one = own, two = row[other].first;
        if (kind(own) != F) std::swap(one, two);
        if (!can_pair(one, two)) continue;
        PairedRow joined = row;
        joined[place] = {one, two};
        joined.erase(joined.begin() + other);
        return joined;
      }
    return {};
  }

  Moved exchange(const PairedRow& row, int place, Dice& dice) const {
    if (place + 1 >= static_cast<int>(row.size())) return {};
    auto one = row[place], two = row[place + 1];
    if (one.second < 0 || two.second < 0) return {};
    bool backwards = dice.below(2);
    PairedOp first{two.first, one.second}, second{one.first, two.second};
    if (backwards) std::swap(first, second);
    if (!can_pair(first.first, first.second) || !can_pair(second.first, second.second)) return {};
    PairedRow own = row;
    own[place] = first;
    own[place + 1] = second;
    return own;
  }

  Moved delay(const PairedRow& row, int place, Dice& dice) const {
    int first = last(row[place]);
    if (kind(first) != BW && kind(first) != W) return {};
    int target = std::min(static_cast<int>(row.size()), place + 1 + dice.below(far));
    PairedRow own(row.begin(), row.begin() + place), late;
    own.reserve(row.size() + far);
    for (int number = place; number < target; ++number) {
      int code = last(row[number]);
      if (stage(code) != stage(first) || (kind(code) != BW && kind(code) != W)) {
        own.push_back(row[number]);
        continue;
      }
      late.push_back({as(code, W), -1});
      if (kind(code) == BW) {
        own.push_back(row[number]);
        (own.back().second >= 0 ? own.back().second : own.back().first) = as(code, B);
      }
    }
    own.insert(own.end(), late.begin(), late.end());
    own.insert(own.end(), row.begin() + target, row.end());
    return own;
  }

  Moved advance(const PairedRow& row, int place, Dice& dice) const {
    int first = last(row[place]);
    if (kind(first) != W) return {};
    int target = std::max(0, place - 1 - dice.below(far));
    PairedRow own(row.begin(), row.begin() + target), others;
    own.reserve(row.size());
    for (int number = target; number <= place; ++number) {
      int code = last(row[number]);
      (kind(code) == W && stage(code) == stage(first) ? own : others).push_back(row[number]);
    }
    own.insert(own.end(), others.begin(), others.end());
    own.insert(own.end(), row.begin() + place + 1, row.end());
    return own;
  }

  Moved fuse(const PairedRow& row, int place) const {
    int half = last(row[place]);
    if (kind(half) != B && kind(half) != W) return {};
    PairedRow own;
    own.reserve(row.size());
    for (const auto& op : row)
      if (op.first != as(half, W)) own.push_back(op);
    for (auto& op : own)
      for (int* code : {&op.first, &op.second})
        if (*code == as(half, B)) *code = as(half, BW);
    return own;
  }

  int S, m, chunks;
  std::vector<int> chunk;
  std::vector<double> times, forward_hop, backward_hop, change;
};

}  // namespace zb
