// Threads that help the caller. The caller walks through a program; its loops are shared out item by item to whoever is
// there. A helper that the system is not running is not waited for, unless it holds an item.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace octavo {

// Memory that only grows, aligned to pages.
class Scratch {
 public:
  uint8_t* reserve(size_t bytes);
  uint8_t* data() const { return data_; }

 private:
  struct Free {
    void operator()(uint8_t* p) const;
  };
  std::unique_ptr<uint8_t, Free> owner_;
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

// A thread as the bodies of loops see it.
struct alignas(64) Worker {
  uint8_t* local = nullptr;  // this thread's scratch

  // True for a thread's first item of the current loop.
  bool fresh() {
    const bool first = seen_ != loop_;
    seen_ = loop_;
    return first;
  }

 private:
  friend class Team;
  uint64_t loop_ = 0, seen_ = 0;
};

class Team {
 public:
  // `leave` is called by a thread when it has nothing more to do.
  Team(int threads, void (*leave)());
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return static_cast<int>(workers_.size()); }
  // Scratch of at least so many bytes per thread and in common, from now on.
  void reserve(size_t local, size_t shared);
  uint8_t* shared() const { return shared_.data(); }

  // body(worker, i) for each i in [0, count), count < 2^24; returns when all are done. Items start in order.
  template <typename Body> void parallel(int64_t count, Body&& body) {
    const auto call = [](void* context, Worker& worker, int64_t i) { (*static_cast<Body*>(context))(worker, i); };
    run(count, call, &body);
  }
  // The caller's program is over.
  void finish() const { leave_(); }

 private:
  using Call = void (*)(void* context, Worker& worker, int64_t i);

  void run(int64_t count, Call call, void* context);
  void help(size_t id);
  bool take_item(Worker& worker);
  void park(uint64_t ticket);

  void (*const leave_)();
  std::vector<Worker> workers_;  // the caller's first
  std::vector<Scratch> local_;
  Scratch shared_;
  std::vector<std::thread> threads_;

  // The loop at hand; changed only when no item of it is left.
  Call call_ = nullptr;
  void* context_ = nullptr;
  uint64_t loop_ = 0;

  // the loop's number (its low 16 bits), how many items it has, and the next of them (24 bits each)
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int64_t> done_{0};

  alignas(64) std::atomic<int> parked_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
};

// `count` rows in chunks: body(worker, begin, end).
template <typename Body> void for_chunks(Team& team, int64_t count, int64_t chunk, Body body) {
  team.parallel((count + chunk - 1) / chunk, [&](Worker& worker, int64_t i) {
    body(worker, i * chunk, (i + 1) * chunk < count ? (i + 1) * chunk : count);
  });
}

}  // namespace octavo
