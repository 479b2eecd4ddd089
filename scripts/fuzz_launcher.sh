#!/usr/bin/env bash
# Fuzzes what the launcher reads before it starts anything (test/launcher/fuzz), with clang's libFuzzer and its
# sanitizers. Needs clang, which nothing else here does: apt-get install clang.
#
#   scripts/fuzz_launcher.sh [SECONDS [--update]]      (default: 60)
#
# Begins with the corpus in the tree, and ends with status 1 where an input crashes, hangs or leaks; that input stays
# in build/fuzz/found. --update puts what has reached new code, minimised, into the tree's corpus, where the
# test launcher.fuzz_corpus tries it again without clang.
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=${1:-60}
case $seconds in '' | *[!0-9]*) echo "SECONDS must be a number, not '$seconds'" >&2; exit 2 ;; esac
command -v clang++ > /dev/null || { echo "needs clang++: apt-get install clang" >&2; exit 2; }

build=build/fuzz
corpus=test/launcher/fuzz/corpus
cmake -S . -B $build -G Ninja -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_BUILD_TYPE=RelWithDebInfo \
  -DDDP_BUILD_LIBRARY=OFF -DDDP_BUILD_FUZZERS=ON -DDDP_SANITIZE=ON > /dev/null
cmake --build $build --target launcher_fuzz

mkdir -p $build/corpus $build/found
# The options' names and the variables, so that the fuzzer need not guess them letter by letter.
{
  grep -oE '"[a-z_]+", (0|.[a-z].), "' launcher/option_table.cpp |
    sed -E 's/^"([a-z_]+)".*/\1/; h; s/.*/"--&="/; p; x; s/.*/"$PET_\U&="/'
  grep -ohE '"(SLURM|OMPI|MASTER|TORCHELASTIC|DDP|CUDA|PYTHON)_[A-Z_]+"' launcher/*.cpp | sort -u |
    sed -E 's/^"(.*)"$/"$\1="/'
  printf '%s\n' '"c10d"' '"static"' '"node"' '"exclusive"' '"ddprun"' '"message"' '"extraInfo"' '"\\x0a"'
} > $build/dictionary

export UBSAN_OPTIONS=print_stacktrace=1
limits=(-fork=0 -max_len=600 -timeout=10 -rss_limit_mb=2048 -artifact_prefix=$build/found/ -print_final_stats=1)
$build/bin/launcher_fuzz -max_total_time="$seconds" "${limits[@]}" -dict=$build/dictionary -verbosity=1 \
  $build/corpus $corpus

if [ "${2:-}" = --update ]; then
  rm -rf $build/minimised
  mkdir $build/minimised
  # By the code that is reached alone, not by how often, and as few files as reach it: a corpus to keep is small. Those
  # with names are written by hand, and stay.
  $build/bin/launcher_fuzz -set_cover_merge=1 -use_counters=0 "${limits[@]}" $build/minimised $corpus $build/corpus
  find $corpus -regextype posix-extended -regex '.*/[0-9a-f]{40}' -delete
  cp $build/minimised/* $corpus/
fi
echo "fuzz_launcher: $seconds s without a crash; $(ls $corpus | wc -l) files in the corpus"
