# Part of setup.sh: libtorch, an existing one or the PyPI wheel without its GPU libraries.
# shellcheck shell=bash disable=SC2154 # sourced; deps, root and torch_version are set by its siblings

# The version that is tested. CPU use needs these three wheels and none of their dependencies.
torch_version=2.15.0
torch_wheels=(torch==2.15.0 nvidia-cuda-runtime==13.2.86 nvidia-cuda-cupti==13.2.86)
torch_download_mb=553
torch_disk_gb=1.3
# The wheels are chosen for this Python whatever python3 runs pip: nothing of Python is used at run time.
wheel_python=3.11
wheel_abi=cp311
wheel_platforms=(manylinux_2_28 manylinux_2_27 manylinux_2_25 manylinux_2_17)

# Prints every reason why folder $1 is no libtorch that Weft can use.
torch_findings() {
  local dir=$1 file version
  for file in include/torch/headeronly/version.h include/torch/csrc/distributed/c10d/Backend.hpp \
    include/torch/csrc/api/include/torch/nn/module.h include/ATen/ATen.h lib/libtorch_cpu.so lib/libc10.so; do
    if [ ! -e "$dir/$file" ]; then
      case $file in
        *version.h) if [ -d "$dir/include/torch" ]; then echo "$file is missing: older than 2.11, which Weft needs"; else echo "$file is missing"; fi ;;
        *c10d*) echo "$file is missing: built without distributed support (USE_DISTRIBUTED=1)" ;;
        *) echo "$file is missing" ;;
      esac
    fi
  done
  if [ -e "$dir/include/torch/headeronly/version.h" ]; then
    version=$(awk '/define TORCH_VERSION_(MAJOR|MINOR|PATCH) / {printf "%s%s", dot, $3; dot = "."}' "$dir/include/torch/headeronly/version.h")
    if [ "$(printf '%s\n' 2.11 "$version" | sort -V | head -n 1)" != 2.11 ]; then echo "version $version is older than 2.11"; fi
  fi
  for file in lib/libtorch_cpu.so lib/libc10.so; do
    # A pointer of a large-file store, or a download that was cut; ldd would end this script without a word.
    if [ -e "$dir/$file" ] && [ "$(head -c 4 "$dir/$file" | tail -c 3)" != ELF ]; then
      echo "$file is not a shared library"
      return
    fi
  done
  if [ -e "$dir/lib/libc10.so" ] && ! grep -qaF 'NSt7__cxx1112basic_string' "$dir/lib/libc10.so"; then
    echo "lib/libc10.so has the old C++ ABI (_GLIBCXX_USE_CXX11_ABI=0); take a build with the C++11 ABI"
  fi
  if [ -e "$dir/lib/libtorch_cpu.so" ]; then
    if ! grep -qaF 'c10d16ProcessGroupGloo' "$dir/lib/libtorch_cpu.so"; then echo "lib/libtorch_cpu.so holds no Gloo back end (USE_DISTRIBUTED=1, USE_GLOO=1)"; fi
    { ldd "$dir/lib/libtorch_cpu.so" 2>/dev/null || true; } | awk '/not found/ {print "lib/libtorch_cpu.so needs " $1 ", which is not found"}'
  fi
}

# The folder with include/ and lib/ for what the user named: itself, or the usual places below it.
torch_folder() {
  local candidate
  for candidate in "$1" "$1/torch" "$1/libtorch" "$1"/lib/python3*/site-packages/torch; do
    if [ -d "$candidate/include/torch" ] && [ -d "$candidate/lib" ]; then
      realpath "$candidate"
      return
    fi
  done
  realpath -m "$1"
}

use_existing_libtorch() {
  torch_dir=$(torch_folder "$WEFT_TORCH")
  # Checked once for each state of the library.
  local state
  state="$torch_dir $(stat -Lc '%Y %s' "$torch_dir/lib/libtorch_cpu.so" "$torch_dir/lib/libc10.so" 2>/dev/null | tr '\n' ' ' || true)"
  if [ -f "$deps/checked" ] && [ "$(cat "$deps/checked")" = "$state" ]; then return; fi
  local findings
  findings=$(torch_findings "$torch_dir")
  if [ -n "$findings" ]; then
    say "WEFT_TORCH=$WEFT_TORCH is no libtorch that Weft can use:"
    printf '  %s\n' "${findings//$'\n'/$'\n  '}" >&2
    fail "name another, or unset WEFT_TORCH to download $torch_version"
  fi
  printf '%s' "$state" >"$deps/checked"
}

install_libtorch() {
  if [ -n "${WEFT_TORCH:-}" ]; then
    use_existing_libtorch
    return
  fi
  local cache=${WEFT_CACHE:-$deps}
  mkdir -p "$cache"
  cache=$(realpath "$cache")
  local home=$cache/libtorch-$torch_version
  torch_dir=$home/torch
  if [ -f "$home/complete" ]; then return; fi
  exec 7>"$cache/libtorch.lock"
  flock 7 # the cache may be shared by checkouts
  if [ -f "$home/complete" ]; then return; fi
  download_libtorch "$home"
}

download_libtorch() {
  local home=$1 machine options=() platform free_gb
  machine=$(uname -m)
  for platform in "${wheel_platforms[@]}"; do options+=(--platform "${platform}_$machine"); done
  free_gb=$(df -Pk "$(dirname "$home")" | awk 'NR == 2 {print int($4 / 1e6)}')
  if [ "$free_gb" -lt 3 ]; then fail "$(dirname "$home") has $free_gb GB free; libtorch needs 3 GB while it is unpacked (WEFT_CACHE names another folder)"; fi
  say "will download libtorch $torch_version ($torch_download_mb MB, $torch_disk_gb GB on disk) to $home"
  rm -rf "$home.new".*
  local new=$home.new.$$
  find_pip
  "${pip[@]}" install --quiet --disable-pip-version-check --no-input --no-deps --no-compile --only-binary=:all: --target "$new" \
    --python-version "$wheel_python" --implementation cp --abi "$wheel_abi" --abi none "${options[@]}" "${torch_wheels[@]}" >"$deps/pip.log" 2>&1 ||
    { tail -n 5 "$deps/pip.log" >&2; rm -rf "$new"; fail "the download failed; WEFT_TORCH=FOLDER takes a libtorch >= 2.11 that is there already"; }
  local findings
  findings=$(torch_findings "$new/torch")
  if [ -n "$findings" ]; then fail "the downloaded libtorch is unfit: $findings"; fi
  rm -rf "$home"
  touch "$new/complete"
  mv "$new" "$home"
}

# pip of any Python 3; unpacked with the other packages when the system has none and this user is not root.
find_pip() {
  if python3 -m pip --version >/dev/null 2>&1; then
    pip=(python3 -m pip)
  elif [ -d "$root/usr/lib/python3/dist-packages/pip" ]; then
    pip=(env "PYTHONPATH=$root/usr/lib/python3/dist-packages" python3 -m pip)
  else
    fail "python3 -m pip is needed to fetch libtorch (Debian: python3-pip), or WEFT_TORCH=FOLDER with a libtorch >= 2.11"
  fi
}
