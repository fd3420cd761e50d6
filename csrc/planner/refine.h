// Local search on rows; core/search/refine.py is the reference.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "dice.h"
#include "timeline.h"

namespace zb {

class Refiner {
 public:
  Refiner(const Problem& problem, Timeline& line, uint64_t seed) : p(problem), line(line), dice(seed) {}

  // Replaces `best` by the best rows found, and returns their cost.
  double run(int32_t* best, int64_t tries, double heat) {
    std::vector<int32_t> rows(best, best + line.begin.back());
    Cost found = line.evaluate(rows.data());
    double best_cost = found.cost, score = found.cost + kMeanWeight * found.mean;
    int64_t used = 1;
    while (used < tries && best_cost < kNever) {
      collect_moves(rows.data());
      for (int i = static_cast<int>(moves.size()) - 1; i > 0; --i) std::swap(moves[i], moves[dice.below(i + 1)]);
      bool moved = false;
      for (const Move& move : moves) {
        if (used >= tries) break;
        int32_t* row = rows.data() + line.begin[move.rank];
        shift(row, move.origin, move.to, move.size);
        found = line.evaluate(rows.data());
        ++used;
        const double warmth = heat * (1.0 - static_cast<double>(used) / static_cast<double>(tries));
        if (found.cost + kMeanWeight * found.mean < score + warmth * dice.uniform() - kSlack) {
          score = found.cost + kMeanWeight * found.mean;
          if (found.cost < best_cost - kSlack) {
            best_cost = found.cost;
            std::copy(rows.begin(), rows.end(), best);
          }
          moved = true;
          break;
        }
        if (move.to < move.origin)
          shift(row, move.to, move.origin + move.size - 1, move.size);
        else
          shift(row, move.to - move.size + 1, move.origin, move.size);
      }
      if (!moved && (heat == 0 || moves.empty())) break;
    }
    return best_cost;
  }

 private:
  static constexpr double kSlack = 1e-6, kMeanWeight = 0.02;
  static constexpr int kReach = 8;

  struct Move {
    int rank, origin, to, size;
  };

  static void shift(int32_t* row, int origin, int to, int size) {
    if (to < origin)
      std::rotate(row + to, row + origin, row + origin + size);
    else
      std::rotate(row + origin, row + origin + size, row + to + 1);
  }

  double lateness(const int32_t* rows, int rank) const {
    const int last = line.begin[rank + 1] - 1;
    return line.starts[last] + p.duration[rows[last]] - p.origin[rank];
  }

  void collect_moves(const int32_t* rows) {
    if (p.may_fuse) line.fits(rows);
    line.run(rows);
    moves.clear();
    double latest = -kNever;
    for (int r = 0; r < p.num_ranks; ++r) latest = std::max(latest, lateness(rows, r));
    std::vector<int> longest;
    for (int r = 0; r < p.num_ranks; ++r)
      if (lateness(rows, r) >= latest - kSlack) longest.push_back(r);
    int rank = longest[dice.below(static_cast<int>(longest.size()))];
    int place = line.begin[rank + 1] - 1, last = place;
    while (true) {
      if (place > line.begin[rank] && line.fused[place - 1]) {
        --place;
        continue;
      }
      const int code = rows[place], before = p.source[code];
      const double start = line.starts[place];
      double arrival = -1.0;
      int other_place = 0;
      if (before != kNone) {
        other_place = line.places[before * line.m + line.number[place]];
        arrival = line.starts[other_place] + p.duration[before];
        if (line.fused[other_place]) arrival += p.duration[before + 1];
        arrival += p.hop[code];
      }
      const bool follows =
          place > line.begin[rank] && line.starts[place - 1] + p.duration[rows[place - 1]] >= start - kSlack;
      const bool arrives = arrival >= start - kSlack;
      if (follows && !(arrives && dice.uniform() < 0.5)) {
        --place;
        continue;
      }
      add_moves(rows, rank, place - line.begin[rank], last - line.begin[rank]);
      if (!arrives) return;
      rank = p.rank[before];
      place = other_place;
      last = place + line.fused[place];
    }
  }

  void add_moves(const int32_t* rows, int rank, int first, int last) {
    if (first == last) return;
    const int32_t* row = rows + line.begin[rank];
    const char* fused = line.fused.data() + line.begin[rank];
    for (int end : {last, last - 1}) {
      const int size = 1 + (end > first && fused[end - 1]), origin = end - size + 1;
      for (int to = origin - 1; to > std::max(first - 1, origin - kReach); --to) {
        if (row[to] == row[origin]) break;
        if (!(to && fused[to - 1])) moves.push_back({rank, origin, to, size});
      }
    }
    const int size = 1 + fused[first];
    for (int to = first + size; to < std::min(last + 1, first + size - 1 + kReach); ++to) {
      if (row[to] == row[first]) break;
      if (!fused[to]) moves.push_back({rank, first, to, size});
    }
  }

  const Problem& p;
  Timeline& line;
  std::vector<Move> moves;
  Dice dice;
};

}  // namespace zb
