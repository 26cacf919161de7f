"""Access control: who may do what.

`permission` says what requests need; each handler is registered with a permission. `accounts` has the accounts and
white lists of plain_acl.yml. `acl_file` reads and writes the text of such a file, `acl_files` owns the files, and
`addresses` has the patterns of white lists. `guard` lets a request through or refuses it. `handlers` answers the codes
50 to 54.
"""
