-- Leases messages whose time has not come. KEYS: the lease keys, then the lists of one queue. ARGV: how many at most, owner,
-- seconds of the lease. Returns {{id, list, body}, ...}.
local wanted, owner, seconds = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[3])
local taken = {}
for i = 9, #KEYS do
  local list = KEYS[i]
  local problem = problem_of(delayed_from(list), 'zset') or problem_of_level(list)
  if problem then return {err = problem} end
end
for i = 9, #KEYS do
  local list = KEYS[i]
  for _, id in ipairs(redis.call('ZRANGE', delayed_from(list), 0, wanted - #taken - 1)) do
    undelay(id, record_of(id))
    revoke(id)
    redis.call('ZREM', delayed_from(list), id)
    local body = redis.call('HGET', BODIES, id)
    if body then
      grant(id, owner, list, seconds)
      taken[#taken + 1] = {id, list, body}
    end
  end
  if #taken >= wanted then break end
end
return taken
