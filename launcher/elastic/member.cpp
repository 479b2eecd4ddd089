#include <utility>

#include <launcher/elastic/member.h>

namespace ddp::launcher {

using Phase = JobState::Phase;

void Member::want(Node node) {
  wanted_ = std::move(node);
  engaged_.reset();
  waiting_told_ = false;
}

void Member::set_failed(int round, WorkerFailure failure, bool final) {
  failed_ = Failed{round, std::move(failure), final};
}

void Member::set_closing(int status, std::string why) {
  closing_ = Closing{status, std::move(why)};
}

void Member::contribute(JobState& state) const {
  // A failure that is written more than once would be counted more than once.
  if (failed_) report_failure(state, failed_->round, failed_->failure, failed_->final);
  if (done_) report_done(state, id_, *done_);
  if (wanted_) join(state, *wanted_);
  if (closing_) close(state, closing_->status, closing_->why);
}

Member::Event Member::look(const JobState& state) {
  failed_.reset();
  done_.reset();
  closing_.reset();
  if (closed_) return {};
  if (state.phase == Phase::kClosed) {
    closed_ = true;
    wanted_.reset();
    return {Event::Kind::kClosed, state.reason};
  }
  const Node* self = state.find(id_);
  const bool in_round = state.phase == Phase::kRunning && self != nullptr && self->member;
  if (engaged_) {
    if (in_round && state.round == *engaged_) return {};
    engaged_.reset();
    return {Event::Kind::kRestart, self != nullptr
                                       ? state.reason
                                       : "this node was taken for dead: it gave no sign "
                                         "of life for too long"};
  }
  if (!wanted_) return {};
  if (in_round) {
    engaged_ = state.round;
    wanted_.reset();
    return {Event::Kind::kBegin, {}};
  }
  if (state.phase == Phase::kRunning && self != nullptr && !waiting_told_) {
    waiting_told_ = true;
    return {Event::Kind::kWaiting, state.reason};
  }
  return {};
}

}  // namespace ddp::launcher
