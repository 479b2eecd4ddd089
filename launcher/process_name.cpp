#include <sys/prctl.h>

#include <cstring>

#include <launcher/process_name.h>

namespace ddp::launcher {

void rename_process(int argc, char** argv, const char* title) {
  ::prctl(PR_SET_NAME, title);
  if (argc < 1) return;
  char* const first = argv[0];
  char* end = first;  // argv's strings lie one after another
  for (int i = 0; i < argc && argv[i] == end; ++i) end += std::strlen(argv[i]) + 1;
  if (end == first) return;
  std::memset(first, 0, static_cast<size_t>(end - first));
  std::strncpy(first, title, static_cast<size_t>(end - first) - 1);
}

}  // namespace ddp::launcher
