# Stands in for valkey/valkey: the server of Debian. A volume made at /data keeps its owner.
FROM headrace-stack/trixie
RUN mkdir /data && chown valkey:valkey /data
VOLUME /data
WORKDIR /data
ENV PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
CMD ["valkey-server"]
