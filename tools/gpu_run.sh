#!/bin/sh
# Runs the GPU tests of the bundle that this script lies in and writes a receipt: no cargo is needed.
#   usage: run.sh RECEIPT.json [TEST...]
# The tests look for their data in the checkout that they were built in; where that folder is missing, it is made to
# lead to the checkout that the current folder is.
set -u
here=$(cd "$(dirname "$0")" && pwd)
receipt=$1
shift
root=$(cat "$here/root")
if [ ! -e "$root" ]; then
    mkdir -p "$(dirname "$root")"
    ln -s "$PWD" "$root"
fi
[ $# -gt 0 ] || set -- $(cd "$here/tests" && ls)
total_passed=0
total_failed=0
results=
for name in "$@"; do
    log=$(mktemp)
    start=$(date +%s)
    "$here/tests/$name" >"$log" 2>&1
    status=$?
    seconds=$(($(date +%s) - start))
    passed=$(sed -n 's/^test result: .* \([0-9]*\) passed.*/\1/p' "$log")
    failed=$(sed -n 's/^test result: .* \([0-9]*\) failed.*/\1/p' "$log")
    passed=${passed:-0}
    # A program that ended without its closing line has failed.
    failed=${failed:-1}
    [ "$status" -eq 0 ] || [ "$failed" -gt 0 ] || failed=1
    [ "$failed" -eq 0 ] || cat "$log"
    echo "$name: $passed passed, $failed failed, $seconds s"
    total_passed=$((total_passed + passed))
    total_failed=$((total_failed + failed))
    results="$results${results:+,}
    {\"test\": \"$name\", \"passed\": $passed, \"failed\": $failed, \"seconds\": $seconds}"
    rm -f "$log"
done
query() { nvidia-smi --query-gpu="$1" --format=csv,noheader 2>/dev/null | head -n 1; }
cat >"$receipt" <<JSON
{
  "device": "$(query name)",
  "memory": "$(query memory.total)",
  "driver": "$(query driver_version)",
  "commit": "$(cat "$here/commit")",
  "passed": $total_passed,
  "failed": $total_failed,
  "tests": [$results
  ]
}
JSON
echo "$total_passed passed, $total_failed failed"
[ "$total_failed" -eq 0 ]
