#!/bin/sh
# Certificates to try docker-compose.tls.yml with: an authority, and what it signs for scheduler, executor and client.
#
#     deploy/certificates.sh
#
# They go to RARA_TLS_DIR, `deploy/tls` by default, and are good for 30 days. Whoever reaches that folder can read the
# keys, since the containers' user is another one. In production take the certificates of your own authority.
set -eu
folder=${RARA_TLS_DIR:-$(dirname "$0")/tls}
mkdir -p "$folder"
cd "$folder"

new_key="-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
# shellcheck disable=SC2086 # these are words
openssl req -x509 $new_key -days 30 -subj /CN=rara-compose -keyout ca.key -out ca.pem 2>/dev/null

issue() { # NAME SUBJECT-ALTERNATIVE-NAMES
    # shellcheck disable=SC2086
    openssl req $new_key -subj "/CN=$1" -keyout "$1.key" -out "$1.csr" 2>/dev/null
    printf 'subjectAltName=%s\nextendedKeyUsage=serverAuth,clientAuth\n' "$2" > "$1.ext"
    openssl x509 -req -days 30 -in "$1.csr" -CA ca.pem -CAkey ca.key -CAcreateserial -extfile "$1.ext" \
        -out "$1.pem" 2>/dev/null
    rm "$1.csr" "$1.ext"
}
issue scheduler DNS:scheduler,DNS:localhost,IP:127.0.0.1
issue executor DNS:executor
issue client DNS:client

chmod 644 ./*.pem scheduler.key executor.key client.key
echo "certificates in $folder"
