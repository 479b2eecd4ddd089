#!/usr/bin/env python3
"""Compares docs/errors.md with the errors that the library throws and with the tests that read them.

    scripts/check_errors.py [ROOT]

Prints what is missing, and ends with status 1 where something is. In docs/errors.md the first column of a table that
is headed `text` holds the fixed parts of error texts, each a code span in which `…` stands for a value.
1. Each of these is part of one string literal under ddp/ (adjacent literals count as one).
2. A literal in a test has at least 14 characters of it in a row that no other error has, or is such a part itself;
   or it stands in NOT_READ.
3. Each literal under ddp/ that reads like an error (three words; two in a statement that throws) contains one of
   them, or stands in NOT_ERRORS.
"""
import pathlib
import re
import sys

OTHERS = "## Texts of LibTorch and Gloo"  # not looked at, as they are in no source
NOT_ERRORS = {
    "texts of other libraries, to be recognised": [
        "Exception raised from", "This may indicate a possible", "Application timeout caused pair closure",
        "closed by peer", "reset by peer",
        "busy or unavailable", "out of memory", "driver version is insufficient"],
    "parts that stand for an `…` of an entry": [
        "the program's store", "the init_method's host", "the environment variable MASTER_ADDR", "in the options",
        'in the init_method "…"', "none found", "the name service does not answer", "a tensor of …", "an empty list",
        "broadcast_buffers=…, init_sync=…",
        ", param_dtype=…", "…… …: shape […], strides […], …", "… parameter… and … buffer…",
        "rank … has …, rank … has ….", "their descriptions have the same digest", "bucket … of … (… ... …, …",
        "has no input left", "is in a forward", "is in a backward", "said something unknown", "rank … of …: join:",
        "Leave them out, and move", "Leave them out, or move"],
    "what a layer prints, or a list in an entry": ["ddp::SyncBatchNorm(…, eps", "… (…, a class of its own)"],
    "the form of an error file": ['{"message": {"message": '],
    "what logging_data() prints": ["…forward_compute_time: … ns", "module_name: …", "broadcast_buffers: …", "bucket_sizes: …"],
    "what is said before or after an entry": [
        "Start the program with `launch`", "… (rank 0, unless the program gave a store of its own)",
        "(it does not require a gradient any more)", "rank …: rank … has not … within … s"],
    "what a compiler is told": ["clang loop vectorize"],
    "parts of texts over shared memory": ["… of … elements (…)", "the group's rank …"],
    "cannot happen: the address was looked up before": ['"…" is not a numeric address'],
    "what stands for an `…` of an entry over NCCL": [
        "the all-reduce of …", "rank 0's order of the gradients", "whether another rank used the parameters", "1, LibTorch"],
}
NOT_READ = {
    "needs a GPU, or a driver's library of another kind": ["NCCL cannot be used: …", "libcuda.so.1 is not the NVIDIA driver's library"],
}
TOKEN = re.compile(r"//[^\n]*|/\*.*?\*/|'(?:\\.|[^'\\\n])+'|\"((?:\\.|[^\"\\\n])*)\"", re.S)
LENGTH = 14


def literals(path, without=r"#include[^\n]*"):
    """[literal, the statement before it]: adjacent literals joined, escapes undone, values as `…`."""
    text = re.sub(without, "", path.read_text(encoding="utf-8"))
    joined, end = [], 0
    for token in TOKEN.finditer(text):
        if token.group(1) is None:
            continue
        literal = re.sub(r"\\(.)", lambda match: "\n" if match[1] == "n" else match[1], token.group(1))
        if joined and not TOKEN.sub("", text[end:token.start()]).strip():
            joined[-1][0] += literal
        else:
            joined.append([literal, re.split(r"[;{}]", text[end:token.start()])[-1]])
        end = token.end()
    for entry in joined:
        entry[0] = re.sub(r"\{[0-9]*(:[^{}]*)?\}", "…", entry[0]).replace("{{", "{").replace("}}", "}")
    return joined


def entries(page):
    phrases, header = [], ""
    for line in page.split(OTHERS)[0].splitlines():
        header = (header or line) if line.startswith("|") else ""
        if header.startswith("| text |") and line != header:
            phrases += re.findall(r"`([^`]+)`", line.split("|")[1])
    return phrases


def has(text, phrase):
    if "…" not in phrase:
        return phrase in text
    return re.search(".*?".join(map(re.escape, phrase.split("…"))), text, re.S) is not None


def is_read(phrase, others, tests):
    """Whether a test has a part of the phrase that stands in none of the other texts."""
    pieces = phrase.split("…")
    length = min(LENGTH, max(map(len, pieces)))
    parts = {piece[i:i + length] for piece in pieces for i in range(len(piece) - length + 1)}
    windows = [pieces[i:j] for i in range(len(pieces)) for j in range(i + 2, len(pieces) + 1)]
    parts.update(test for test in tests if test in phrase)
    parts.update("…".join(window) for window in windows if sum(map(len, window)) >= LENGTH)
    found = [part for part in parts if any(has(test, part) for test in tests)]
    return any(not any(has(other, part) for other in others) for part in found)


def main():
    sys.stdout.reconfigure(errors="replace")
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent)
    files = {name: [path for path in sorted((root / name).rglob("*")) if path.suffix in (".cpp", ".h")]
             for name in ("ddp", "test/unit", "test/process")}
    phrases = entries((root / "docs/errors.md").read_text(encoding="utf-8"))
    found = [(path, *entry) for path in files["ddp"] for entry in literals(path)]
    texts = {text for _, text, _ in found}
    named = r"#include[^\n]*|(TEST_CASE|SECTION)\(\s*(\"(\\.|[^\"\\])*\"\s*)+"  # says what a test is about, and reads nothing
    tests = {text for path in files["test/unit"] + files["test/process"]
             for text, _ in literals(path, named) if len(text) > 9}
    missing = [] if phrases else ["docs/errors.md has no entries"]
    for phrase in phrases:
        others = [text for text in texts if not has(text, phrase)]
        if len(others) == len(texts):
            missing.append(f"docs/errors.md: not in a source: {phrase}")
        elif not any(part in phrase for part in sum(NOT_READ.values(), [])) and not is_read(phrase, others, tests):
            missing.append(f"docs/errors.md: no test reads: {phrase}")
    for path, text, statement in found:
        least = 2 if re.search(r"\b(throw|refuse|fail_collective|communication_failed)\b", statement) else 3
        words = [word for word in text.split() if re.search(r"[A-Za-z]{2}", word)]
        known = text.strip().startswith(tuple(sum(NOT_ERRORS.values(), [])))
        if len(words) >= least and not known and not any(has(text, phrase) for phrase in phrases):
            missing.append(f"{path.relative_to(root)}: not in docs/errors.md: {text}")
    print("\n".join([*missing, f"{len(phrases)} texts in docs/errors.md, {len(missing)} missing"]))
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
