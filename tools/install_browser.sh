#!/usr/bin/env bash
# Bring the Chromium that the browser tests drive, where apt can; say what is there otherwise. Never fails a build.
set -u

for name in chromium chromium-browser google-chrome google-chrome-stable; do
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
if "${as_root[@]}" apt-get update >"$log" 2>&1 &&
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends chromium >>"$log" 2>&1 &&
  found=$(command -v chromium); then
  echo "browser: installed $found"
  rm -f "$log"
else
  echo "browser: apt-get could not install chromium (its words: $log); the browser tests are skipped"
fi
exit 0
