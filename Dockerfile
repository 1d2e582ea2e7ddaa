# The server of `tapeout serve`. It holds no model: mount the artifacts of a run, see deploy/compose.yaml.
FROM python:3.11-slim-bookworm AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY tapeout tapeout
COPY engines engines
COPY quantization quantization
COPY evals evals
COPY runtime runtime
COPY pipeline pipeline
RUN python -m venv /opt/tapeout \
 && /opt/tapeout/bin/pip install --no-cache-dir '.[serve,signing,otel,postgres]'

FROM python:3.11-slim-bookworm
RUN useradd --create-home --uid 10001 tapeout \
 && install -d -o tapeout -g tapeout /var/lib/tapeout /var/cache/tapeout
COPY --from=build /opt/tapeout /opt/tapeout
ENV PATH=/opt/tapeout/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    TAPEOUT_CACHE=/var/cache/tapeout
USER 10001
# Usage records, their journal and the traffic log are written here.
WORKDIR /var/lib/tapeout
VOLUME ["/var/lib/tapeout"]
EXPOSE 8000
# The engine has time to end its requests after SIGTERM (--drain-seconds).
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["tapeout"]
CMD ["serve", "/artifacts/candidate", "--host", "0.0.0.0", "--port", "8000"]
