// The hot loops of the schedule search: evaluate, compact, refill and refine rows of passes.
//
// Each does, operation by operation, what its namesake in megatron/zero_bubble/search does, so that both give the same
// numbers to the last bit (build without fused multiply-add); the Python is the reference and says why. A plain C
// interface without Python's headers: any host can load it.
//
// A row holds codes 3 * stage + kind (0 F, 1 B, 2 W); the n-th of a code is for microbatch n. The rows of all ranks lie
// one behind the other.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <queue>
#include <utility>
#include <vector>

extern "C" {

// One scheduling problem; arrays by code, except limit, work and origin, which are by rank.
struct zb_problem {
  int32_t num_ranks, num_stages, num_microbatches;
  const int32_t* rank;
  const int32_t* source;
  const int32_t* receiver;
  const double* duration;
  const double* hop;
  const double* delta;
  const double* limit;
  const double* work;
  const double* origin;
};

}  // extern "C"

namespace {

constexpr int kNone = -1;
constexpr int kForward = 0, kBackward = 1, kWgrad = 2;
constexpr double kNever = std::numeric_limits<double>::infinity();

// Where each rank's row begins.
std::vector<int> row_begins(const zb_problem& p) {
  std::vector<int> begin(p.num_ranks + 1, 0);
  for (int c = 0; c < 3 * p.num_stages; ++c) begin[p.rank[c] + 1] += p.num_microbatches;
  for (int r = 0; r < p.num_ranks; ++r) begin[r + 1] += begin[r];
  return begin;
}

struct Cost {
  double cost = kNever, mean = kNever;
};

// search/timeline.py.
class Timeline {
 public:
  explicit Timeline(const zb_problem& problem)
      : p(problem),
        m(problem.num_microbatches),
        begin(row_begins(problem)),
        starts(begin.back()),
        number(begin.back()),
        places(begin.back()),
        ends(begin.back()),
        count(3 * problem.num_stages),
        at(problem.num_ranks),
        waits_for(problem.num_ranks),
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
    run(rows);
    Cost result{-kNever, 0.0};
    for (int r = 0; r < p.num_ranks; ++r) {
      if (at[r] < begin[r + 1]) return {};
      const double cost = free_at[r] - p.origin[r];
      result.cost = std::max(result.cost, cost);
      result.mean += cost;
    }
    result.mean /= p.num_ranks;
    return result;
  }

  // Each pass as early as possible, as far as the rows get.
  void run(const int32_t* rows) {
    std::fill(count.begin(), count.end(), 0);
    runnable.clear();
    for (int r = 0; r < p.num_ranks; ++r) {
      at[r] = begin[r];
      free_at[r] = 0.0;
      waits_for[r] = kNone;
      runnable.push_back(r);
    }
    while (!runnable.empty()) {
      const int rank = runnable.back();
      runnable.pop_back();
      double now = free_at[rank];
      for (; at[rank] < begin[rank + 1]; ++at[rank]) {
        const int place = at[rank], code = rows[place], source = p.source[code], n = count[code];
        double arrival = p.hop[code];
        if (source != kNone) {
          if (n >= count[source]) {
            waits_for[rank] = source;
            break;
          }
          arrival = ends[source * m + n] + p.hop[code];
        }
        now = std::max(now, arrival);
        starts[place] = now;
        number[place] = n;
        places[code * m + n] = place;
        now += p.duration[code];
        ends[code * m + n] = now;
        ++count[code];
        const int other = p.receiver[code];
        if (other != kNone && waits_for[other] == code) {
          waits_for[other] = kNone;
          runnable.push_back(other);
        }
      }
      free_at[rank] = now;
    }
  }

  const zb_problem& p;
  const int m;
  const std::vector<int> begin;
  std::vector<double> starts;
  std::vector<int> number, places;

 private:
  std::vector<double> ends;
  std::vector<int> count, at, waits_for, runnable;
  std::vector<double> free_at;
};

// search/compact.py.
class Compactor {
 public:
  explicit Compactor(const zb_problem& problem)
      : p(problem),
        m(problem.num_microbatches),
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

  // Reorders rows in place; false when they deadlock or do not fit.
  bool run(int32_t* rows_, const int32_t* most_held_, double haste, bool backwards_) {
    reset(rows_, most_held_, haste, backwards_);
    const int turn = 3 * (p.num_stages - 1);
    for (int r = 0; r < p.num_ranks; ++r) events.push({0.0, r});
    while (!events.empty()) {
      const auto [now, rank] = events.top();
      events.pop();
      if (now < free_at[rank] || position[rank] == begin[rank + 1]) continue;
      const int head = rows[position[rank]];
      double soon = count[head] < arrived[head] ? arrivals[head * m + count[head]] : kNever;
      if (delta[head] > 0 && kept[rank] + delta[head] > p.limit[rank]) soon = kNever;
      const int code = soon <= now + kSlack ? head : overtake(rank, now, soon);
      if (code == kNone) {
        if (soon < kNever) events.push({soon, rank});
        continue;
      }
      const double end = now + p.duration[code];
      free_at[rank] = end;
      events.push({end, rank});
      kept[rank] += delta[code];
      ++count[code];
      ++position[rank];
      const int kind = code % 3;
      if (!backwards && kind == kBackward) arrivals[(code + 1) * m + arrived[code + 1]++] = end;
      if (backwards && kind == kWgrad) gate(code - kWgrad, end);
      const int follower = kind == kWgrad ? kNone : kind == kBackward ? code - 3 : code < turn ? code + 3 : code + 1;
      if (follower < 0) continue;
      const double arrival = end + p.hop[follower];
      if (backwards && kind == kForward && follower % 3 == kForward) {
        landed[follower / 3 * m + num_landed[follower / 3]++] = arrival;
        gate(follower, 0.0);
      } else {
        arrivals[follower * m + arrived[follower]++] = arrival;
      }
      const int other = p.rank[follower];
      if (other != rank && free_at[other] <= arrival) events.push({arrival, other});
    }
    for (int r = 0; r < p.num_ranks; ++r)
      if (position[r] < begin[r + 1]) return false;
    return true;
  }

 private:
  using Event = std::pair<double, int>;
  static constexpr double kSlack = 1e-9;
  static constexpr int kLookAhead = 36;

  void reset(int32_t* rows_, const int32_t* most_held_, double haste, bool backwards_) {
    rows = rows_;
    most_held = most_held_;
    late = 1.0 - haste;
    backwards = backwards_;
    std::copy(p.delta, p.delta + 3 * p.num_stages, delta.begin());
    std::fill(num_landed.begin(), num_landed.end(), 0);
    std::fill(arrived.begin(), arrived.end(), 0);
    std::fill(count.begin(), count.end(), 0);
    std::fill(kept.begin(), kept.end(), 0.0);
    std::fill(free_at.begin(), free_at.end(), 0.0);
    std::copy(begin.begin(), begin.end() - 1, position.begin());
    if (backwards) {
      std::fill(landed.begin(), landed.begin() + m, 0.0);
      num_landed[0] = m;
      for (int s = 0; s < p.num_stages; ++s) {
        const double whole = p.delta[3 * s], wgrad = -p.delta[3 * s + kWgrad];
        delta[3 * s] = whole - wgrad;
        delta[3 * s + kBackward] = -whole;
        delta[3 * s + kWgrad] = wgrad;
        arrived[3 * s + kWgrad] = m;
        std::fill_n(arrivals.begin() + (3 * s + kWgrad) * m, m, 0.0);
      }
    } else {
      std::fill(arrivals.begin(), arrivals.begin() + m, 0.0);
      arrived[kForward] = m;
    }
  }

  void gate(int code, double wgrad_end) {
    const int n = arrived[code];
    if (n < num_landed[code / 3] && n < count[code + kWgrad])
      arrivals[code * m + arrived[code]++] = std::max(landed[code / 3 * m + n], wgrad_end);
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
    const int last = std::min(at + kLookAhead, begin[rank + 1]);
    for (int place = at; place < last; ++place) {
      const int code = rows[place];
      const auto found = place > at ? std::find(ready.begin(), ready.end(), code) : ready.end();
      if (found != ready.end()) {
        if (delta[code] <= 0 || peak + delta[code] <= p.limit[rank]) {
          std::rotate(rows + at, rows + place, rows + place + 1);
          return code;
        }
        ready.erase(found);
      }
      held += delta[code];
      peak = std::max(peak, held);
    }
    return kNone;
  }

  const zb_problem& p;
  const int m;
  int32_t* rows = nullptr;
  const int32_t* most_held = nullptr;
  double late = 1.0;
  bool backwards = false;
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

// search/refill.py.
class Refiller {
 public:
  explicit Refiller(const zb_problem& problem)
      : p(problem),
        m(problem.num_microbatches),
        begin(row_begins(problem)),
        ends(3 * problem.num_stages * m),
        count(3 * problem.num_stages),
        position(problem.num_ranks),
        placed(problem.num_ranks),
        waits_for(problem.num_ranks),
        free_at(problem.num_ranks),
        kept(problem.num_ranks),
        spare(problem.num_ranks),
        first_pending(problem.num_ranks),
        last_pending(problem.num_ranks),
        pending(begin.back() / 3) {}

  // Writes the new rows into full; false when they deadlock or do not fit.
  bool run(const int32_t* rows, double eagerness, double target, int32_t* full) {
    std::fill(count.begin(), count.end(), 0);
    runnable.clear();
    for (int r = 0; r < p.num_ranks; ++r) {
      free_at[r] = kept[r] = 0.0;
      position[r] = placed[r] = begin[r];
      first_pending[r] = last_pending[r] = begin[r] / 3;
      waits_for[r] = kNone;
      spare[r] = target + p.origin[r] - p.work[r];
      runnable.push_back(r);
    }
    while (!runnable.empty()) {
      const int rank = runnable.back();
      runnable.pop_back();
      if (!advance(rank, rows, eagerness, full)) return false;
    }
    for (int r = 0; r < p.num_ranks; ++r) {
      if (position[r] < begin[r + 1]) return false;
      std::copy(pending.begin() + first_pending[r], pending.begin() + last_pending[r], full + placed[r]);
    }
    return true;
  }

 private:
  static constexpr double kSlack = 1e-9;

  // Runs one rank until a pass's input is missing; false when memory does not suffice.
  bool advance(int rank, const int32_t* rows, double eagerness, int32_t* full) {
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
      const int source = p.source[code], n = count[code];
      double arrival = p.hop[code];
      if (source != kNone) {
        if (n >= count[source]) {
          waits_for[rank] = source;
          break;
        }
        arrival = ends[source * m + n] + p.hop[code];
      }
      const double change = p.delta[code];
      while (head < tail && (now + p.duration[pending[head]] <= arrival + kSlack || (change > 0 && held + change > limit)))
        run_wgrad();
      held += change;
      if (change > 0 && held > limit) return false;
      if (arrival > now) {
        const double gap = arrival - now;
        if (head < tail && (gap > eagerness * p.duration[pending[head]] || gap > spare[rank] + kSlack)) run_wgrad();
        if (arrival > now) {
          spare[rank] -= arrival - now;
          now = arrival;
        }
      }
      full[out++] = code;
      now += p.duration[code];
      ends[code * m + n] = now;
      count[code] = n + 1;
      if (code % 3 == kBackward) pending[tail++] = code + 1;
      const int other = p.receiver[code];
      if (other != kNone && waits_for[other] == code) {
        waits_for[other] = kNone;
        runnable.push_back(other);
      }
    }
    position[rank] = at;
    free_at[rank] = now;
    kept[rank] = held;
    return true;
  }

  const zb_problem& p;
  const int m;
  const std::vector<int> begin;
  std::vector<double> ends;
  std::vector<int> count, position, placed, waits_for;
  std::vector<double> free_at, kept, spare;
  std::vector<int> first_pending, last_pending, pending, runnable;
};

// search/dice.py: splitmix64 (Steele, Lea and Flood 2014).
class Dice {
 public:
  explicit Dice(uint64_t seed) : state(seed) {}

  double uniform() { return static_cast<double>(roll() >> 11) * 0x1.0p-53; }

  int below(int n) { return static_cast<int>(roll() % static_cast<uint64_t>(n)); }

 private:
  uint64_t roll() {
    state += 0x9E3779B97F4A7C15ull;
    uint64_t z = state;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }

  uint64_t state;
};

// search/refine.py.
class Refiner {
 public:
  Refiner(const zb_problem& problem, Timeline& line, uint64_t seed) : p(problem), line(line), dice(seed) {}

  // Returns the cost; rows become the best found.
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
        shift(row, move.origin, move.to);
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
        shift(row, move.to, move.origin);
      }
      if (!moved && (heat == 0 || moves.empty())) break;
    }
    return best_cost;
  }

 private:
  static constexpr double kSlack = 1e-6, kMeanWeight = 0.02;
  static constexpr int kReach = 8;

  struct Move {
    int rank, origin, to;
  };

  static void shift(int32_t* row, int origin, int to) {
    if (to < origin)
      std::rotate(row + to, row + origin, row + origin + 1);
    else
      std::rotate(row + origin, row + origin + 1, row + to + 1);
  }

  double lateness(const int32_t* rows, int rank) const {
    const int last = line.begin[rank + 1] - 1;
    return line.starts[last] + p.duration[rows[last]] - p.origin[rank];
  }

  void collect_moves(const int32_t* rows) {
    line.run(rows);
    moves.clear();
    double latest = -kNever;
    for (int r = 0; r < p.num_ranks; ++r) latest = std::max(latest, lateness(rows, r));
    std::vector<int> longest;
    for (int r = 0; r < p.num_ranks; ++r)
      if (lateness(rows, r) > latest - kSlack) longest.push_back(r);
    int rank = longest[dice.below(static_cast<int>(longest.size()))];
    int place = line.begin[rank + 1] - 1, last = place;
    while (true) {
      const int code = rows[place], before = p.source[code];
      const double start = line.starts[place];
      double arrival = -1.0;
      int other_place = 0;
      if (before != kNone) {
        other_place = line.places[before * line.m + line.number[place]];
        arrival = line.starts[other_place] + p.duration[before] + p.hop[code];
      }
      const bool follows =
          place > line.begin[rank] && line.starts[place - 1] + p.duration[rows[place - 1]] > start - kSlack;
      const bool arrives = arrival > start - kSlack;
      if (follows && !(arrives && dice.uniform() < 0.5)) {
        --place;
        continue;
      }
      add_moves(rows + line.begin[rank], rank, place - line.begin[rank], last - line.begin[rank]);
      if (!arrives) return;
      rank = p.rank[before];
      place = last = other_place;
    }
  }

  void add_moves(const int32_t* row, int rank, int first, int last) {
    if (first == last) return;
    for (int end : {last, last - 1})
      for (int to = end - 1; to > std::max(first - 1, end - kReach); --to) {
        if (row[to] == row[end]) break;
        moves.push_back({rank, end, to});
      }
    for (int to = first + 1; to < std::min(last + 1, first + kReach); ++to) {
      if (row[to] == row[first]) break;
      moves.push_back({rank, first, to});
    }
  }

  const zb_problem& p;
  Timeline& line;
  std::vector<Move> moves;
  Dice dice;
};

}  // namespace

extern "C" {

// A problem with the memory that its loops work in; the arrays of the problem must outlive it.
struct zb_planner {
  const zb_problem problem;
  Timeline line;
  Compactor compactor;
  Refiller refiller;

  explicit zb_planner(const zb_problem& p) : problem(p), line(problem), compactor(problem), refiller(problem) {}
};

zb_planner* zb_open(const zb_problem* problem) { return new zb_planner(*problem); }

void zb_close(zb_planner* planner) { delete planner; }

// The cost of rows (infinity where infeasible); *mean is its mean over ranks.
double zb_evaluate(zb_planner* planner, const int32_t* rows, double* mean) {
  const Cost found = planner->line.evaluate(rows);
  *mean = found.mean;
  return found.cost;
}

// Rows run backwards in time, in place.
void zb_mirror(zb_planner* planner, int32_t* rows) {
  const std::vector<int>& begin = planner->line.begin;
  for (size_t r = 0; r + 1 < begin.size(); ++r) std::reverse(rows + begin[r], rows + begin[r + 1]);
  for (int i = 0; i < begin.back(); ++i) {
    const int kind = rows[i] % 3;
    rows[i] += kind == kForward ? 1 : kind == kBackward ? -1 : 0;
  }
}

// Reorders rows in place; 0 where they deadlock or do not fit. With backwards, problem and rows are mirrored ones.
int32_t zb_compact(zb_planner* planner, int32_t* rows, const int32_t* most_held, double haste, int32_t backwards) {
  return planner->compactor.run(rows, most_held, haste, backwards);
}

// Writes rows with their W's placed anew into full; 0 where they deadlock or do not fit.
int32_t zb_refill(zb_planner* planner, const int32_t* rows, double eagerness, double target, int32_t* full) {
  return planner->refiller.run(rows, eagerness, target, full);
}

// Improves rows in place and returns their cost.
double zb_refine(zb_planner* planner, int32_t* rows, int64_t tries, double heat, int64_t seed) {
  return Refiner(planner->problem, planner->line, static_cast<uint64_t>(seed)).run(rows, tries, heat);
}

}  // extern "C"
