#include "pool.h"

#include <chrono>
#include <cstdlib>
#include <new>

namespace octavo {
namespace {

constexpr auto kSpin = std::chrono::microseconds(100);  // before an idle helper parks
constexpr int kLooksPerClock = 32;
constexpr int kLooksBeforeYield = 4096;  // while the last items are in other hands

constexpr uint64_t kItemBits = 24, kItemMask = (1 << kItemBits) - 1;

uint64_t next_item(uint64_t ticket) { return ticket & kItemMask; }
uint64_t item_count(uint64_t ticket) { return ticket >> kItemBits & kItemMask; }
uint64_t loop_of(uint64_t ticket) { return ticket >> 2 * kItemBits; }
bool has_items(uint64_t ticket) { return next_item(ticket) < item_count(ticket); }

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

}  // namespace

void Scratch::Free::operator()(uint8_t* p) const { std::free(p); }

uint8_t* Scratch::reserve(size_t bytes) {
  if (bytes > size_) {
    size_ = (bytes + bytes / 4 + 4095) / 4096 * 4096;
    data_ = static_cast<uint8_t*>(std::aligned_alloc(4096, size_));
    if (!data_) throw std::bad_alloc();
    owner_.reset(data_);
  }
  return data_;
}

Team::Team(int threads, void (*leave)())
    : leave_(leave), workers_(static_cast<size_t>(threads < 1 ? 1 : threads)), local_(workers_.size()) {
  for (size_t id = 1; id < workers_.size(); ++id) threads_.emplace_back([this, id] { help(id); });
}

Team::~Team() {
  {
    const std::lock_guard lock(mutex_);
    stop_.store(true);
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Team::reserve(size_t local, size_t shared) {
  for (size_t id = 0; id < workers_.size(); ++id) workers_[id].local = local_[id].reserve(local);
  shared_.reserve(shared);
}

// Takes one item if there is one. A loop cannot end before the items that were claimed from it are done, so after a
// claim what call_, context_ and loop_ hold is right for it.
bool Team::take_item(Worker& worker) {
  uint64_t ticket = ticket_.load(std::memory_order_relaxed);
  do {
    if (!has_items(ticket)) return false;
  } while (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acquire, std::memory_order_relaxed));
  worker.loop_ = loop_;
  call_(context_, worker, static_cast<int64_t>(next_item(ticket)));
  done_.fetch_add(1, std::memory_order_release);
  return true;
}

void Team::run(int64_t count, Call call, void* context) {
  Worker& caller = workers_[0];
  if (count <= 1 || workers_.size() == 1) {  // nobody else is asked
    caller.loop_ = ++loop_;
    for (int64_t i = 0; i < count; ++i) call(context, caller, i);
    return;
  }
  call_ = call;
  context_ = context;
  ++loop_;
  done_.store(0, std::memory_order_relaxed);
  ticket_.store(loop_ << 2 * kItemBits | static_cast<uint64_t>(count) << kItemBits, std::memory_order_seq_cst);
  if (parked_.load(std::memory_order_seq_cst) > 0) {
    const std::lock_guard lock(mutex_);
    wake_.notify_all();
  }
  while (take_item(caller)) {
  }
  for (int looks = 0; done_.load(std::memory_order_acquire) != count; ++looks) {
    if (looks < kLooksBeforeYield)
      pause();
    else
      std::this_thread::yield();
  }
}

void Team::help(size_t id) {
  Worker& worker = workers_[id];
  while (!stop_.load(std::memory_order_relaxed)) {
    const auto parks_at = std::chrono::steady_clock::now() + kSpin;
    uint64_t ticket = 0;
    for (int looks = 1;; ++looks) {
      ticket = ticket_.load(std::memory_order_relaxed);
      if (has_items(ticket) || (looks % kLooksPerClock == 0 && std::chrono::steady_clock::now() >= parks_at)) break;
      pause();
    }
    if (has_items(ticket)) {
      while (take_item(worker)) {
      }
    } else {
      leave_();
      park(ticket);
    }
  }
  leave_();
}

// Sleeps until a loop other than the ticket's begins.
void Team::park(uint64_t ticket) {
  std::unique_lock lock(mutex_);
  parked_.fetch_add(1, std::memory_order_seq_cst);
  wake_.wait(lock, [&] {
    return stop_.load(std::memory_order_relaxed) || loop_of(ticket_.load(std::memory_order_seq_cst)) != loop_of(ticket);
  });
  parked_.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace octavo
