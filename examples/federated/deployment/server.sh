#!/bin/bash
# On the server, once: name and port under which clients reach it, a certificate for a year, and a
# service that systemd starts again whenever it dies.
#
#     HOST=server.example.org PORT=9443 bash server.sh

set -e
mkdir -p ~/federation ~/.config/systemd/user && cd ~/federation
echo "HOST=${HOST:=$(hostname --fqdn)}" > env
echo "PORT=${PORT:=9443}" >> env
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 365 -subj "/CN=$HOST" \
    -addext "subjectAltName=DNS:$HOST,IP:127.0.0.1" -keyout server.key -out server.crt
cat > ~/.config/systemd/user/superlink.service <<'END'
[Service]
WorkingDirectory=%h/federation
EnvironmentFile=%h/federation/env
Environment=PATH=%h/federation/venv/bin:/usr/bin:/bin FLWR_TELEMETRY_ENABLED=0
ExecStart=%h/federation/venv/bin/flower-superlink --host 0.0.0.0 --port ${PORT} --database superlink.db \
    --ssl-certfile server.crt --ssl-keyfile server.key --ssl-ca-certfile server.crt \
    --enable-supernode-auth --disable-runtime-dependency-installation
Restart=always
RestartSec=5

[Install]
WantedBy=default.target
END
systemctl --user enable --now superlink
loginctl enable-linger
