#include "session.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>

namespace octavo {

void Session::execute(std::unique_ptr<Op> op) {
  team_.reserve(op->local_bytes(), op->shared_bytes());
  op->run(team_);
  team_.finish();
  if (!recording_) return;
  recording_->local_bytes = std::max(recording_->local_bytes, op->local_bytes());
  recording_->shared_bytes = std::max(recording_->shared_bytes, op->shared_bytes());
  recording_->ops.push_back(std::move(op));
}

void Session::start_recording() {
  if (recording_) throw std::logic_error("a plan is being recorded already");
  recording_ = std::make_unique<Plan>();
}

std::unique_ptr<Plan> Session::finish_recording() {
  if (!recording_) throw std::logic_error("no plan is being recorded");
  return std::move(recording_);
}

void Session::replay(Plan& plan) {
  if (recording_) throw std::logic_error("a plan cannot run while another is being recorded");
  team_.reserve(plan.local_bytes, plan.shared_bytes);
  for (const auto& op : plan.ops) op->run(team_);
  team_.finish();
}

std::vector<double> Session::replay_timed(Plan& plan) {
  if (recording_) throw std::logic_error("a plan cannot run while another is being recorded");
  team_.reserve(plan.local_bytes, plan.shared_bytes);
  std::vector<double> ends;
  ends.reserve(plan.ops.size());
  const auto begin = std::chrono::steady_clock::now();
  for (const auto& op : plan.ops) {
    op->run(team_);
    team_.finish();
    ends.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  return ends;
}

}  // namespace octavo
