#include <signal.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>

#include <launcher/elastic/call_limit.h>

namespace ddp::launcher {
namespace {

// Written before the timer is first set, read in the handler.
int last_words_socket = -1;
std::string last_words;

void end_process(int) {
  ::send(last_words_socket, last_words.data(), last_words.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  ::_exit(1);
}

void set_timer(std::chrono::milliseconds time) {
  itimerval timer{};
  timer.it_value.tv_sec = static_cast<time_t>(time.count() / 1000);
  timer.it_value.tv_usec = static_cast<suseconds_t>(time.count() % 1000 * 1000);
  ::setitimer(ITIMER_REAL, &timer, nullptr);
}

}  // namespace

void CallLimit::set_last_words(int socket, const std::string& text) {
  last_words_socket = socket;
  last_words = text;
  struct sigaction action {};
  action.sa_handler = end_process;
  ::sigaction(SIGALRM, &action, nullptr);
  sigset_t alarm;
  sigemptyset(&alarm);
  sigaddset(&alarm, SIGALRM);
  ::sigprocmask(SIG_UNBLOCK, &alarm, nullptr);
}

CallLimit::CallLimit(std::chrono::milliseconds time) {
  set_timer(std::max(time, std::chrono::milliseconds(1)));
}

CallLimit::~CallLimit() { set_timer(std::chrono::milliseconds(0)); }

}  // namespace ddp::launcher
