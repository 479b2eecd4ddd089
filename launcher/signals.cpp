#include <algorithm>
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

constexpr std::array kPassedOn = {SIGUSR1, SIGUSR2, SIGTSTP, SIGCONT};

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

int signal_number(std::string_view name) {
  const std::string full =
      name.substr(0, 3) == "SIG" ? std::string(name) : fmt::format("SIG{}", name);
  for (const auto& [number, known] : kNames) {
    if (full == known) return number;
  }
  return 0;
}

bool may_be_handled(int signal) {
  constexpr std::array kNever = {SIGKILL, SIGSTOP, SIGCHLD, SIGCONT, SIGTSTP, SIGTTIN, SIGTTOU,
                                 SIGSEGV, SIGBUS,  SIGFPE,  SIGILL,  SIGTRAP, SIGSYS,  SIGPIPE};
  return std::find(kNever.begin(), kNever.end(), signal) == kNever.end();
}

SignalTakeover::SignalTakeover(const std::set<int>& ending) {
  struct sigaction action {};
  action.sa_handler = SIG_IGN;
  ::sigaction(SIGPIPE, &action, &original_sigpipe_);
  // A parent that ignored SIGCHLD would make the kernel throw the workers' exit statuses away.
  action.sa_handler = SIG_DFL;
  ::sigaction(SIGCHLD, &action, nullptr);

  sigemptyset(&handled_);
  sigaddset(&handled_, SIGCHLD);
  std::set<int> wanted = ending;
  wanted.insert(kPassedOn.begin(), kPassedOn.end());
  for (const int signal : wanted) {
    if (!is_ignored(signal)) sigaddset(&handled_, signal);
  }
  ::sigprocmask(SIG_BLOCK, &handled_, &original_mask_);
}

void SignalTakeover::restore() const {
  ::sigaction(SIGPIPE, &original_sigpipe_, nullptr);
  ::sigprocmask(SIG_SETMASK, &original_mask_, nullptr);
}

}  // namespace ddp::launcher
