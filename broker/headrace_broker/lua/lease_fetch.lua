-- Pops messages and leases them in one step, so that none is ever in nobody's hands.
-- KEYS: the five lease keys, then the lists in the order in which they are served.
-- ARGV: how many, owner, seconds of the lease, delivery limit.
-- Returns {{id, list, body, deliveries}, ...} of the leased and {{list, body, deliveries}, ...} of the exhausted.
local wanted, owner, seconds, limit = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local leased, exhausted = {}, {}
local pops_left = wanted + 100 -- however many messages are refused, the script stays short
for i = 6, #KEYS do
  local list = KEYS[i]
  while #leased < wanted and pops_left > 0 do
    local body = redis.call('RPOP', list)
    if not body then break end
    pops_left = pops_left - 1
    local id = redis.sha1hex(body)
    if redis.call('HEXISTS', BODIES, id) == 1 then
      bury(body, list, 0, 'duplicate') -- a copy of a message that is being worked on
    else
      local deliveries = redis.call('HINCRBY', DELIVERIES, id, 1)
      if deliveries > limit then
        redis.call('HDEL', DELIVERIES, id)
        bury(body, list, limit, 'delivery limit')
        exhausted[#exhausted + 1] = {list, body, limit}
      else
        grant(id, owner, list, body, seconds)
        leased[#leased + 1] = {id, list, body, deliveries}
      end
    end
  end
end
return {leased, exhausted}
