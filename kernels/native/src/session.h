// Runs operations now, and records them for replay.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cpu.h"
#include "pool.h"

namespace octavo {

// One operation with its addresses and sizes; what the addresses hold may change between runs.
class Op {
 public:
  virtual ~Op() = default;
  virtual void run(Team& team) = 0;
  virtual size_t local_bytes() const { return 0; }   // scratch per thread
  virtual size_t shared_bytes() const { return 0; }  // scratch in common

  std::vector<std::shared_ptr<const void>> keeps;  // owners of the memory that it names
};

class Plan {
 public:
  Plan() = default;
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  std::vector<std::unique_ptr<Op>> ops;
  size_t local_bytes = 0, shared_bytes = 0;
};

class Session {
 public:
  Session(const std::string& isa, int threads) : table(choose_table(isa)), team_(threads, table.leave) {}

  const KernelTable& table;
  int threads() const { return team_.size(); }
  bool recording() const { return recording_ != nullptr; }

  // Run the operation; when recording, keep it too.
  void execute(std::unique_ptr<Op> op);
  // From now on every executed operation also joins a plan, until finish_recording() hands it over.
  void start_recording();
  std::unique_ptr<Plan> finish_recording();
  void abandon_recording() { recording_.reset(); }
  void replay(Plan& plan);
  // As replay(), waiting for each operation: when each had ended, in seconds since the begin.
  std::vector<double> replay_timed(Plan& plan);
  size_t recorded() const { return recording_ ? recording_->ops.size() : 0; }

 private:
  Team team_;
  std::unique_ptr<Plan> recording_;
};

}  // namespace octavo
