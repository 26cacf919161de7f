"""Access control: who may do what.

`permission` says what each request code needs; each handler is registered with one. `accounts` are the accounts and
white lists of plain_acl.yml, which `acl_file` reads and changes, `acl_files` owns, and `addresses` has the patterns
for. `guard` lets a request through or refuses it. `handlers` answers the codes 50 to 54.
"""
