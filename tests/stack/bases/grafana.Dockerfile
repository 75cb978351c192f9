# Stands in for grafana/grafana, which no package registry has: only its health address answers.
FROM headrace-stack/trixie
RUN ln -s /usr/bin/busybox /usr/local/bin/wget && mkdir -p /www/api /var/lib/grafana && echo ok > /www/api/health
USER 472
ENTRYPOINT ["/usr/bin/busybox", "httpd", "-f", "-p", "3000", "-h", "/www"]
