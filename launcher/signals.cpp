#include <array>
#include <utility>

#include <fmt/format.h>

#include <launcher/signals.h>

namespace ddp::launcher {
namespace {

constexpr std::pair<int, const char*> kNames[] = {
    {SIGHUP, "SIGHUP"},       {SIGINT, "SIGINT"},   {SIGQUIT, "SIGQUIT"},   {SIGILL, "SIGILL"},
    {SIGTRAP, "SIGTRAP"},     {SIGABRT, "SIGABRT"}, {SIGBUS, "SIGBUS"},     {SIGFPE, "SIGFPE"},
    {SIGKILL, "SIGKILL"},     {SIGUSR1, "SIGUSR1"}, {SIGSEGV, "SIGSEGV"},   {SIGUSR2, "SIGUSR2"},
    {SIGPIPE, "SIGPIPE"},     {SIGALRM, "SIGALRM"}, {SIGTERM, "SIGTERM"},   {SIGCHLD, "SIGCHLD"},
    {SIGCONT, "SIGCONT"},     {SIGSTOP, "SIGSTOP"}, {SIGTSTP, "SIGTSTP"},   {SIGTTIN, "SIGTTIN"},
    {SIGTTOU, "SIGTTOU"},     {SIGURG, "SIGURG"},   {SIGXCPU, "SIGXCPU"},   {SIGXFSZ, "SIGXFSZ"},
    {SIGVTALRM, "SIGVTALRM"}, {SIGPROF, "SIGPROF"}, {SIGWINCH, "SIGWINCH"}, {SIGIO, "SIGIO"},
    {SIGSYS, "SIGSYS"},
};

constexpr std::array kTakenOver = {SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGTSTP, SIGCONT};

bool is_ignored(int signal) {
  struct sigaction action {};
  return ::sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

}  // namespace

std::string signal_name(int signal) {
  for (const auto& [number, name] : kNames) {
    if (number == signal) return name;
  }
  return fmt::format("signal {}", signal);
}

SignalTakeover::SignalTakeover() {
  struct sigaction action {};
  action.sa_handler = SIG_IGN;
  ::sigaction(SIGPIPE, &action, &original_sigpipe_);
  // A parent that ignored SIGCHLD would make the kernel throw the workers' exit statuses away.
  action.sa_handler = SIG_DFL;
  ::sigaction(SIGCHLD, &action, nullptr);

  sigemptyset(&handled_);
  sigaddset(&handled_, SIGCHLD);
  for (const int signal : kTakenOver) {
    if (!is_ignored(signal)) sigaddset(&handled_, signal);
  }
  ::sigprocmask(SIG_BLOCK, &handled_, &original_mask_);
}

void SignalTakeover::restore() const {
  ::sigaction(SIGPIPE, &original_sigpipe_, nullptr);
  ::sigprocmask(SIG_SETMASK, &original_mask_, nullptr);
}

}  // namespace ddp::launcher
