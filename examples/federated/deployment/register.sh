#!/bin/bash
# On the server, with each client's key.pub in ~/federation as client-0.pub, client-1.pub, ...
#
#     bash register.sh

set -e
mkdir -p ~/.flwr && cd ~/federation && . ./env
cat > ~/.flwr/config.toml <<END
[superlink]
default = "federation"

[superlink.federation]
address = "$HOST:$PORT"
root-certificates = "$HOME/federation/server.crt"
END
for key in client-*.pub; do venv/bin/flwr supernode register $key; done
venv/bin/flwr supernode list
