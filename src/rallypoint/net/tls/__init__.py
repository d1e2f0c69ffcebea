"""TLS for links: certificates, who they are for, and the transport that uses them."""
