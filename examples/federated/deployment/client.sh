#!/bin/bash
# On each client, once, with `env` and `server.crt` of the server in ~/federation: a key, and a
# SuperNode next to the data. Two SuperNodes of one machine need two NODE_PORTs and homes. Set
# num-partitions to the number of clients.
#
#     CLIENT=0 bash client.sh

set -e
mkdir -p ~/federation ~/.config/systemd/user && cd ~/federation
echo "CLIENT=${CLIENT:=0}" >> env
echo "NODE_PORT=${NODE_PORT:=9094}" >> env
ssh-keygen -q -t ecdsa -b 384 -N "" -f key
cat > ~/.config/systemd/user/supernode.service <<'END'
[Service]
WorkingDirectory=%h/federation
EnvironmentFile=%h/federation/env
Environment=PATH=%h/federation/venv/bin:/usr/bin:/bin FLWR_TELEMETRY_ENABLED=0
ExecStart=%h/federation/venv/bin/flower-supernode --superlink ${HOST}:${PORT} --port ${NODE_PORT} \
    --root-certificates server.crt --auth-supernode-private-key key \
    --node-config "partition-id=${CLIENT} num-partitions=5"
Restart=always
RestartSec=5

[Install]
WantedBy=default.target
END
systemctl --user enable --now supernode
loginctl enable-linger
