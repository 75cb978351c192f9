-- Budgets of API keys: the tokens that a key has used on a day (UTC, by Redis's clock), and those that its open requests
-- may still use. They are on the server of the requests' queue. Requires key_checks.

local BUDGET_DAY = 86400 -- seconds

local function is_budget_readable(key_name, today)
  return not (problem_of(reserved_key(key_name), 'zset') or problem_of(reserved_tokens_key(key_name), 'hash')
    or problem_of(spent_key(today), 'hash'))
end

local function reserved_by(key_name)
  return number_in(redis.call('HGET', reserved_tokens_key(key_name), ''), 0)
end

-- Ends the reservation of a request, if there is one.
local function release(key_name, request)
  local tokens = redis.call('HGET', reserved_tokens_key(key_name), request)
  if not tokens then return end
  redis.call('ZREM', reserved_key(key_name), request)
  redis.call('HDEL', reserved_tokens_key(key_name), request)
  if redis.call('EXISTS', reserved_key(key_name)) == 0 then
    redis.call('DEL', reserved_tokens_key(key_name))
  else
    redis.call('HSET', reserved_tokens_key(key_name), '', math.max(0, reserved_by(key_name) - number_in(tokens, 0)))
  end
end

-- Counts the tokens of an ended request that has a reservation, and ends it. A request without one was not sent by a
-- gateway for a key with a budget: its header may name any key.
local function spend(key_name, request, tokens, at)
  local reserved = redis.pcall('HGET', reserved_tokens_key(key_name), request)
  local today = at - at % BUDGET_DAY
  if type(reserved) ~= 'string' or not is_budget_readable(key_name, today) then return end
  release(key_name, request)
  local spent = spent_key(today)
  if tokens > 0 then
    local before = redis.call('HGET', spent, key_name)
    redis.call('HSET', spent, key_name, number_in(before, 0) + tokens)
    if not before then redis.call('EXPIRE', spent, 2 * BUDGET_DAY) end
  end
end
