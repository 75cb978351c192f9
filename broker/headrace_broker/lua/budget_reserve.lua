-- Reserves the tokens that requests may use at most, if their API key has some of its budget of today left.
-- KEYS: RESERVED
-- RIGHTS: RESERVED
-- ARGV: key_name, budget, elsewhere, seconds, request[], tokens[]
-- budget: tokens of a day. elsewhere: tokens that count against it on other servers. seconds: after which the
-- reservations expire.
-- Returns {1 if the requests are admitted, tokens used today, tokens reserved before, seconds until tomorrow, the requests
-- that are newly reserved}. A request that has a reservation is admitted and keeps it.
local at = tonumber(redis.call('TIME')[1])
local today = at - at % BUDGET_DAY
local problem = problem_of(RESERVED, 'zset') or problem_of(reserved_tokens_key(key_name), 'hash')
  or problem_of(spent_key(today), 'hash')
if problem then return {err = problem} end
for _, expired in ipairs(redis.call('ZRANGE', RESERVED, '-inf', at, 'BYSCORE', 'LIMIT', 0, 1000)) do -- the next call ends more
  release(key_name, expired)
  redis.call('ZREM', RESERVED, expired) -- also if its tokens were deleted by hand
end
local used = number_in(redis.call('HGET', spent_key(today), key_name), 0)
local reserved, new = reserved_by(key_name), {}
for i, one in ipairs(request) do
  if redis.call('HEXISTS', reserved_tokens_key(key_name), one) == 0 then new[#new + 1] = i end
end
local is_admitted = #new == 0 or used + reserved + tonumber(elsewhere) < tonumber(budget)
local made = {}
for _, i in ipairs(is_admitted and new or {}) do
  redis.call('ZADD', RESERVED, at + tonumber(seconds), request[i])
  redis.call('HSET', reserved_tokens_key(key_name), request[i], tokens[i], '', reserved_by(key_name) + tonumber(tokens[i]))
  made[#made + 1] = request[i]
end
if #made > 0 then
  local kept = math.max(tonumber(seconds), redis.call('TTL', RESERVED))
  redis.call('EXPIRE', RESERVED, kept)
  redis.call('EXPIRE', reserved_tokens_key(key_name), kept)
end
return {is_admitted and 1 or 0, used, reserved, BUDGET_DAY - at % BUDGET_DAY, made}
