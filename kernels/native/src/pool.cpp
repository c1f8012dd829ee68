#include "pool.h"

#include <chrono>
#include <cstdlib>
#include <new>

namespace octavo {
namespace {

constexpr auto kSpin = std::chrono::microseconds(100);  // before an idle thread parks
constexpr int kPausesPerLook = 64;
constexpr int kLooksBeforeYield = 64;  // at a barrier, whose other side is working

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

int64_t Worker::next() {
  return pool_->counter_.fetch_add(1, std::memory_order_relaxed);
}

void Worker::barrier() {
  Pool& p = *pool_;
  ++phase_;
  if (count == 1) {
    p.counter_.store(0, std::memory_order_relaxed);
    return;
  }
  if (p.arrived_.fetch_add(1, std::memory_order_acq_rel) == count - 1) {
    p.arrived_.store(0, std::memory_order_relaxed);
    p.counter_.store(0, std::memory_order_relaxed);
    p.phase_.store(phase_, std::memory_order_release);
    return;
  }
  for (int looks = 0; p.phase_.load(std::memory_order_acquire) != phase_; ++looks) {
    if (looks < kPausesPerLook * kLooksBeforeYield)
      pause();
    else
      std::this_thread::yield();
  }
}

Pool::Pool(int threads) : size_(threads < 1 ? 1 : threads), local_(static_cast<size_t>(size_)) {
  for (int id = 1; id < size_; ++id) threads_.emplace_back([this, id] { work(id); });
}

Pool::~Pool() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    job_.fetch_add(1, std::memory_order_release);
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Pool::reserve(size_t local, size_t shared) {
  for (Scratch& scratch : local_) scratch.reserve(local);
  shared_.reserve(shared);
}

void Pool::enter(int id, const std::function<void(Worker&)>& program) {
  Worker worker;
  worker.id = id;
  worker.count = size_;
  worker.local = local_[static_cast<size_t>(id)].data();
  worker.shared = shared_.data();
  worker.pool_ = this;
  worker.phase_ = phase_.load(std::memory_order_acquire);
  program(worker);
  worker.barrier();  // nobody leaves while another still works
}

void Pool::work(int id) {
  uint32_t seen = 0;
  for (;;) {
    const auto parks_at = std::chrono::steady_clock::now() + kSpin;
    while (job_.load(std::memory_order_acquire) == seen && std::chrono::steady_clock::now() < parks_at)
      for (int i = 0; i < kPausesPerLook; ++i) pause();
    if (job_.load(std::memory_order_acquire) == seen) {
      std::unique_lock lock(mutex_);
      ++parked_;
      wake_.wait(lock, [&] { return job_.load(std::memory_order_relaxed) != seen; });
      --parked_;
    }
    seen = job_.load(std::memory_order_acquire);
    if (stop_) return;
    enter(id, *program_);
  }
}

void Pool::run(const std::function<void(Worker&)>& program) {
  if (size_ > 1) {
    bool parked;
    {
      const std::lock_guard lock(mutex_);
      program_ = &program;
      job_.fetch_add(1, std::memory_order_release);
      parked = parked_ > 0;
    }
    if (parked) wake_.notify_all();
  }
  enter(0, program);
}

}  // namespace octavo
