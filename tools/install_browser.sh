#!/usr/bin/env bash
# Bring the Chromium that the browser tests drive, where apt can; say what is there otherwise. Never fails a build.
set -u

# The first is Chromium without a window: the tests take half of the processor time with it.
for name in chromium-headless-shell chromium chromium-browser google-chrome google-chrome-stable; do
  if found=$(command -v "$name"); then
    echo "browser: $found is here"
    exit 0
  fi
done

if ! command -v apt-get >/dev/null; then
  echo "browser: none found and no apt-get; install Chromium by hand, or the browser tests are skipped"
  exit 0
fi

as_root=()
if [ "$(id -u)" -ne 0 ]; then
  if ! sudo -n true 2>/dev/null; then
    echo "browser: none found; run 'sudo apt-get install chromium', or the browser tests are skipped"
    exit 0
  fi
  as_root=(sudo -n)
fi

log=$(mktemp)
install() { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends "$1" >>"$log" 2>&1; }
if "${as_root[@]}" apt-get update >"$log" 2>&1 && { install chromium-headless-shell || install chromium; } &&
  found=$(command -v chromium-headless-shell || command -v chromium); then
  echo "browser: installed $found"
  rm -f "$log"
else
  echo "browser: apt-get could not install chromium (its words: $log); the browser tests are skipped"
fi
exit 0
