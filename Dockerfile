# An image with ling, on Debian 12. Building it builds ling, runs all tests, and takes only what passed them:
#
#   docker build -t ling .
#   docker run --rm -v "$PWD/work:/work" ling info /usr/local/share/ling/configs/quickstart.yaml
#   docker run --rm -v "$PWD/work:/work" --shm-size=1g --entrypoint mpirun ling -n 2 --bind-to none ling train ...
#
# Its user is `ling`, number 1000, which must be able to write the mounted folder. scripts/launch-kubernetes.yaml uses this image on many
# machines: its user then runs sshd, by which mpirun starts the ranks.
FROM debian:12 AS build
WORKDIR /src
COPY scripts/install-deps.sh scripts/
RUN scripts/install-deps.sh --tests
COPY . .
# For any processor with AVX2. For those that are all of one kind: --build-arg OPTIMIZE="-O3 -march=native", built on one of them.
ARG OPTIMIZE="-O3 -march=x86-64-v3"
RUN make -j"$(nproc)" OPTIMIZE="$OPTIMIZE" install DESTDIR=/stage PREFIX=/usr/local

FROM build AS test
RUN useradd -m tester && chown -R tester /src
USER tester
RUN make -j"$(nproc)" OPTIMIZE="$OPTIMIZE" run-tests && touch /tmp/passed

FROM debian:12-slim
RUN apt-get update -q \
	&& DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends \
		libedit2 libgomp1 libjansson4 libnlopt0 libopenblas0-pthread libopenmpi3 libpcre2-8-0 libpng16-16 libutf8proc2 libyaml-0-2 libzstd1 zlib1g \
		openmpi-bin openssh-client openssh-server \
	&& rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_*
# The MPI operator mounts keys into ~/.ssh of each pod, and each has other machines' names: what ssh asks of a person is off.
RUN useradd -m -u 1000 -s /bin/bash ling \
	&& printf 'Host *\n\tPort 2222\n\tStrictHostKeyChecking no\n\tUserKnownHostsFile /dev/null\n\tLogLevel ERROR\n' \
		>/etc/ssh/ssh_config.d/ling.conf \
	&& printf 'Port 2222\nPidFile none\nHostKey /home/ling/.ssh/id_rsa\nStrictModes no\nPasswordAuthentication no\n' \
		>/etc/ssh/sshd_ling \
	&& install -d -o ling -g ling /work
COPY --from=test /tmp/passed /tmp/passed
COPY --from=build /stage /
COPY configs /usr/local/share/ling/configs
# In a container ranks may not read each other's memory; they copy through /dev/shm.
ENV OMPI_MCA_btl_vader_single_copy_mechanism=none
USER ling
WORKDIR /work
ENTRYPOINT ["ling"]
CMD ["--help"]
