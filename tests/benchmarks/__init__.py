"""Scripts that measure; each says in its first lines what, and how it is called."""

# This folder is a package of its own because Opacus installs one of the same name, which would win.
