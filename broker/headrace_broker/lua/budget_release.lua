-- Ends the reservations of requests that were not put into the queue.
-- KEYS: RESERVED
-- RIGHTS: RESERVED
-- ARGV: key_name, request[]
local problem = problem_of(RESERVED, 'zset') or problem_of(reserved_tokens_key(key_name), 'hash')
if problem then return {err = problem} end
for _, one in ipairs(request) do release(key_name, one) end
