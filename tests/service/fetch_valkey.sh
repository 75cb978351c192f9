#!/bin/sh
# Gets the oldest Valkey that the tests run on, 8.1.1 of Debian 13, into a folder; nothing is installed. Its libraries come
# with it, so that it runs on an older Debian too.
# usage: fetch_valkey.sh FOLDER    then FOLDER/valkey-server runs it
set -eu
folder=$1
command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || { echo "apt-get and dpkg-deb are needed"; exit 1; }
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' 'Label: Debian' | head -n 1)
mkdir -p "$folder/apt/lists/partial" "$folder/apt/archives/partial" "$folder/root"
cd "$folder"
here=$PWD
echo "deb ${mirror:-http://deb.debian.org/debian} trixie main" > apt/sources.list
options="-o Dir::Etc::sourcelist=$here/apt/sources.list -o Dir::Etc::sourceparts=/dev/null
    -o Dir::State::lists=$here/apt/lists -o Dir::Cache=$here/apt -o APT::Sandbox::User=root
    -o Dir::Etc::trusted=/dev/null -o Dir::Etc::trustedparts=/usr/share/keyrings"
apt-get $options update -qq
(cd apt && apt-get $options download -qq valkey-tools libc6 libatomic1 libjemalloc2 liblzf1 libssl3t64 libsystemd0 \
    libcap2 libgcc-s1 libstdc++6 libzstd1)
for package in apt/*.deb; do dpkg-deb -x "$package" root; done
rm -r apt
libraries=$(dirname "$(find "$here/root" -name 'libjemalloc.so.2' | head -n 1)")
loader=$(find "$here/root" -name 'ld-linux-*.so.*' | head -n 1)
# the server, valkey-check-rdb and valkey-check-aof are one program, which goes by its name
cat > valkey-server <<EOF
#!/bin/sh
exec "$loader" --argv0 valkey-server --library-path "$libraries" "$here/root/usr/bin/valkey-check-rdb" "\$@"
EOF
chmod +x valkey-server
./valkey-server --version
