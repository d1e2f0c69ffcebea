# An image with rallypoint, from the wheel in dist/:
#
#   make dist
#   docker build --tag me/rallypoint .                       # torch's own build; it brings CUDA, and is large
#   docker build --tag me/rallypoint --build-arg TORCH="torch --index-url URL" .   # a build for CPUs, from its index
#
# Your own image adds your script and what it imports:
#
#   FROM me/rallypoint
#   COPY train.py .
#
# The roles, each in a container of its own (their options: docs/usage.md, "A cluster by hand"):
#
#   docker run --init me/rallypoint coordinator --bind 0.0.0.0:4700 --advertise HOST:4700 --token-file FILE
#   docker run --init me/rallypoint server --coordinator HOST:4700 --bind 0.0.0.0:4701 --advertise HOST2 --token-file FILE
#   docker run --init me/rallypoint worker --coordinator HOST:4700 --token-file FILE train.py

ARG PYTHON=3.13
FROM python:${PYTHON}-slim AS build

# torch first and by itself: it takes longest, and changes least.
ARG TORCH="torch>=2.9"
RUN python -m venv /opt/rallypoint \
 && /opt/rallypoint/bin/pip install --no-cache-dir --no-compile ${TORCH}
ARG EXTRAS=""
COPY dist/rallypoint-*.whl /tmp/
RUN /opt/rallypoint/bin/pip install --no-cache-dir --no-compile "$(ls /tmp/rallypoint-*.whl)${EXTRAS}"

FROM python:${PYTHON}-slim

COPY --from=build /opt/rallypoint /opt/rallypoint
ENV PATH=/opt/rallypoint/bin:$PATH PYTHONUNBUFFERED=1
# A number: a pod with runAsNonRoot cannot check a name.
RUN useradd --uid 1000 --create-home rallypoint
USER 1000
WORKDIR /home/rallypoint
ENTRYPOINT ["rallypoint"]
CMD ["--help"]
