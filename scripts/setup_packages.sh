# Part of setup.sh: tools and libraries other than libtorch.
# shellcheck shell=bash disable=SC2154 # sourced; deps, root and torch_version are set by its siblings

root=$deps/root # where packages are unpacked without root
triplet=$(uname -m)-linux-gnu

# Debian package | conda-forge package | Fedora package | Spack package | a program, or a header below include/
requirements='
cmake               cmake            cmake                cmake          bin/cmake
ninja-build         ninja            ninja-build          ninja          bin/ninja
g++                 gxx              gcc-c++              gcc            bin/c++
pkg-config          pkg-config       pkgconf-pkg-config   pkgconf        bin/pkg-config
ccache              ccache           ccache               ccache         bin/ccache
libfmt-dev          fmt              fmt-devel            fmt            fmt/format.h
libcli11-dev        cli11            cli11-devel          cli11          CLI/CLI.hpp
nlohmann-json3-dev  nlohmann_json    json-devel           nlohmann-json  nlohmann/json.hpp
libtomlplusplus-dev tomlplusplus     tomlplusplus-devel   tomlplusplus   toml++/toml.h
libhwy-dev          libhwy           highway-devel        highway        hwy/highway.h
libxxhash-dev       xxhash           xxhash-devel         xxhash         xxhash.h
libgtest-dev        gtest            gtest-devel          googletest     gtest/gtest.h
libgmock-dev        gtest            gmock-devel          googletest     gmock/gmock.h
libbenchmark-dev    benchmark        google-benchmark-devel benchmark    benchmark/benchmark.h
python3-pip         pip              python3-pip          py-pip         pip
'
# Only for `make demo`: the program that prints its text (and depends on the package that holds it).
demo_requirements='
bible-kjv           -                -                    -              bin/bible
'

# Folders that may hold include/ and bin/, the caller's own first.
prefixes() {
  printf '%s\n' "${CMAKE_PREFIX_PATH:-}" | tr ':;' '\n'
  printf '%s\n' "${CONDA_PREFIX:-}" /usr/local /usr "$root/usr"
}

# is_present PROBE: a program of PATH or of the unpacked packages, pip if it is still needed, or a header.
is_present() {
  case $1 in
    bin/*) command -v "${1#bin/}" >/dev/null || [ -x "$root/usr/$1" ] ;;
    pip) [ -n "${WEFT_TORCH:-}" ] || [ -f "${WEFT_CACHE:-$deps}/libtorch-$torch_version/complete" ] || python3 -m pip --version >/dev/null 2>&1 ||
         [ -d "$root/usr/lib/python3/dist-packages/pip" ] ;;
    *) local prefix
       while read -r prefix; do
         if [ -n "$prefix" ] && { [ -e "$prefix/include/$1" ] || [ -e "$prefix/include/$triplet/$1" ]; }; then return 0; fi
       done < <(prefixes)
       return 1 ;;
  esac
}

# Column $1 (1 Debian ... 4 Spack) of every requirement that is missing.
missing_column() {
  local debian conda fedora spack probe
  while read -r debian conda fedora spack probe; do
    if [ -z "$debian" ] || is_present "$probe"; then continue; fi
    local columns=("" "$debian" "$conda" "$fedora" "$spack")
    if [ "${columns[$1]}" != - ]; then echo "${columns[$1]}"; fi
  done <<<"$requirements${WEFT_DEMO:+$demo_requirements}" | sort -u | tr '\n' ' '
}

explain_and_stop() {
  say "missing: $(missing_column 1)"
  say "Debian, Ubuntu:  sudo apt-get install $(missing_column 1)"
  say "Fedora:          sudo dnf install $(missing_column 3)"
  say "conda:           conda install -c conda-forge $(missing_column 2)"
  say "Spack:           spack install $(missing_column 4)&& spack load $(missing_column 4)"
  fail "$1"
}

# Bytes that apt would download for packages "$@", as MB; and all package names with it.
announce() {
  local bytes
  bytes=$(apt-get "${apt_options[@]}" --print-uris -y --no-install-recommends install "$@" 2>/dev/null | awk '/^.http|^.file/ {sum += $3} END {print int(sum / 1e6) + 1}')
  say "will download and install $bytes MB of packages: $*"
}

apt_options=()
# Packages are known to apt, after fetching its lists once if they are not.
ensure_apt_lists() {
  if apt-get "${apt_options[@]}" -s --no-install-recommends install "$@" >/dev/null 2>&1; then return; fi
  say "fetching apt's package lists"
  "${as_root[@]}" apt-get "${apt_options[@]}" update -q >"$deps/apt.log" 2>&1 || { tail -n 5 "$deps/apt.log" >&2; explain_and_stop "apt-get update failed"; }
}

as_root=()
install_packages() {
  local packages
  read -r -a packages <<<"$(missing_column 1)"
  if [ ${#packages[@]} -eq 0 ]; then return; fi
  if ! command -v apt-get >/dev/null; then explain_and_stop "this system has no apt; install them as above and run this again"; fi
  if [ "$(id -u)" -eq 0 ]; then
    install_system_wide "${packages[@]}"
  elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
    as_root=(sudo -n)
    install_system_wide "${packages[@]}"
  else
    unpack_locally "${packages[@]}"
  fi
}

install_system_wide() {
  ensure_apt_lists "$@"
  announce "$@"
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -y -q --no-install-recommends -o DPkg::Lock::Timeout=300 install "$@" >"$deps/apt.log" 2>&1 ||
    { tail -n 20 "$deps/apt.log" >&2; fail "apt-get failed; its whole output: $deps/apt.log"; }
}

# Without root: apt downloads with lists and cache of this checkout, and packages are unpacked below .deps/root.
unpack_locally() {
  case " $* " in *" g++ "*) explain_and_stop "a compiler cannot be unpacked without root; install one as above" ;; esac
  mkdir -p "$deps/apt/lists/partial" "$deps/apt/cache/archives/partial" "$deps/apt/debs"
  apt_options=(-o "Dir::Cache=$deps/apt/cache" -o Debug::NoLocking=1)
  if ! apt-get "${apt_options[@]}" -s --no-install-recommends install "$@" >/dev/null 2>&1; then
    apt_options+=(-o "Dir::State::Lists=$deps/apt/lists")
    ensure_apt_lists "$@"
  fi
  # The packages, what is not installed of their dependencies, and the libraries behind the -dev packages even where those
  # are installed: CMake's files name both by one prefix.
  local all
  all=$({ apt-get "${apt_options[@]}" -s --no-install-recommends install "$@" | awk '/^Inst/ {print $2}'
          apt-cache "${apt_options[@]}" depends --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces --no-enhances "$@" |
            awk '$1 == "Depends:" && $2 ~ /^lib/ {print $2}' | grep -vE '^lib(c6|gcc|stdc)' || true; } | sort -u)
  announce "$@"
  say "no root: unpacking below $root"
  # shellcheck disable=SC2086
  (cd "$deps/apt/debs" && apt-get "${apt_options[@]}" download $all >"$deps/apt.log" 2>&1) ||
    { tail -n 5 "$deps/apt.log" >&2; explain_and_stop "apt-get download failed"; }
  rm -rf "$root.new"
  if [ -d "$root" ]; then cp -a "$root" "$root.new"; fi
  local package
  for package in "$deps"/apt/debs/*.deb; do dpkg-deb -x "$package" "$root.new"; done
  find "$root.new/usr" -name '*.pc' -exec sed -i "s#^prefix=/usr\$#prefix=$root/usr#" {} +
  if [ -f "$root.new/usr/bin/bible" ]; then # it looks for its text in /usr/lib
    mv "$root.new/usr/bin/bible" "$root.new/usr/bin/bible.program"
    printf '#!/bin/sh\nexec "%s" -p "%s" "$@"\n' "$root/usr/bin/bible.program" "$root/usr/lib/" >"$root.new/usr/bin/bible"
    chmod +x "$root.new/usr/bin/bible"
  fi
  rm -rf "$root"
  mv "$root.new" "$root"
  rm -rf "$deps/apt"
  local still
  still=$(missing_column 1)
  if [ -n "$still" ]; then explain_and_stop "unpacked packages do not hold: $still"; fi
}
