// Threads that run a program of operations together, meeting at a barrier after each.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace octavo {

// Memory that only grows, aligned to cache lines.
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

class Pool;

// What one thread of a running program sees.
class Worker {
 public:
  int id, count;
  uint8_t* local;   // this thread's scratch
  uint8_t* shared;  // everybody's

  // The next index of the current loop; each index goes to one thread. A loop ends at the next barrier.
  int64_t next();
  // All threads meet; the loop counter starts again at 0.
  void barrier();

 private:
  friend class Pool;
  Pool* pool_ = nullptr;
  uint32_t phase_ = 0;
};

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int size() const { return size_; }
  // Scratch of at least so many bytes per thread and in common, from now on.
  void reserve(size_t local, size_t shared);
  // Calls program(worker) on every thread, the caller's included, and returns when all are done.
  void run(const std::function<void(Worker&)>& program);

 private:
  friend class Worker;
  void work(int id);
  void enter(int id, const std::function<void(Worker&)>& program);

  const int size_;
  std::vector<std::thread> threads_;
  std::vector<Scratch> local_;
  Scratch shared_;

  std::mutex mutex_;
  std::condition_variable wake_;
  const std::function<void(Worker&)>* program_ = nullptr;
  int parked_ = 0;
  bool stop_ = false;

  alignas(64) std::atomic<uint32_t> job_{0};
  alignas(64) std::atomic<int64_t> counter_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
};

}  // namespace octavo
