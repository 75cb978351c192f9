# Stands in for python:*-slim. INDEX is a package index on the loopback of the builder.
FROM headrace-stack/bookworm
ARG INDEX
RUN printf '[global]\nindex-url = %s\n' "$INDEX" > /etc/pip.conf
ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8
CMD ["python3"]
