# Stands in for prom/prometheus: the real Prometheus, as Debian packages it.
FROM headrace-stack/trixie
RUN ln -s /usr/bin/busybox /usr/local/bin/wget && mkdir /prometheus && chown nobody:nogroup /prometheus
ENV PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
USER nobody
VOLUME /prometheus
WORKDIR /prometheus
ENTRYPOINT ["/usr/bin/prometheus"]
